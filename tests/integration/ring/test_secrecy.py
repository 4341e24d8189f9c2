"""A marked prompt is searched for in a capture of every socket and in every log."""

import sys
from pathlib import Path

import psutil
import pytest
from capture import Capture, files_of, forms_of, found_in_files
from ringtest import CLUSTER, chat

pytestmark = CLUSTER
MARK = "zyxwvut marmalade 9274"


async def test_a_marked_prompt_is_seen_on_the_clients_own_connection_only(ring, reference):
    messages = [{"role": "user", "content": f"Please repeat: {MARK}"}]
    forms = forms_of(MARK, reference.tokenizer)
    own_port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    with Capture() as capture:
        reply = await ring.ask(chat(messages[0]["content"]), 30)
        await capture.caught_up()
    assert reply.completion_tokens > 0
    streams = capture.own(ring.cluster.processes.values())
    own = [data for ports, data in streams.items() if own_port in ports]
    others = {ports: data for ports, data in streams.items() if own_port not in ports}
    assert any(forms["utf-8"] in data for data in own), "the capture does not work"
    assert sum(len(data) for data in others.values()) > 5000, "the ring's own traffic was not captured"
    seen = [(name, ports) for ports, data in others.items() for name, form in forms.items() if form in data]
    assert seen == []


async def test_the_reply_is_not_seen_either(ring, reference):
    question = "List the planets in order."
    expected = reference.reply([{"role": "user", "content": question}], 40)
    own_port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    with Capture() as capture:
        await ring.ask(chat(question), 40)
        await capture.caught_up()
    words = {word.encode() for word in expected.text.split() if len(word) > 6}
    assert words
    streams = capture.own(ring.cluster.processes.values())
    others = [data for ports, data in streams.items() if own_port not in ports]
    assert sum(map(len, others)) > 5000, "the ring's own traffic was not captured"
    assert [word for word in words for data in others if word in data] == []


async def test_no_log_and_no_file_holds_the_prompt(ring, reference):
    messages = [{"role": "user", "content": f"Please repeat: {MARK}"}]
    forms = forms_of(MARK, reference.tokenizer)
    await ring.ask(chat(messages[0]["content"]), 30)
    assert any("logs" in path.parts for path, _ in files_of(ring.cluster.state_dir))
    assert found_in_files(ring.cluster.state_dir, forms) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="what a process may leave behind is told by /proc")
async def test_no_process_leaves_memory_in_core_files(ring):
    for name, pid in ring.cluster.processes.items():
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                limits = process.rlimit(psutil.RLIMIT_CORE)
                kept = Path(f"/proc/{process.pid}/coredump_filter").read_text()
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            assert (limits, int(kept or "0", 16)) == ((0, 0), 0), name  # "": it has ended and has no memory
