"""`sealring demo` as a newcomer runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kernels import share_kernels

from sealring.cli.local.leftovers import PORTS

pytestmark = pytest.mark.integration
SEALRING = Path(sys.executable).with_name("sealring")


def test_demo_once_prints_one_json_object(tmp_path):
    """Of two nodes; tests/cli/commands/test_demo.py shows that there are three if nobody says."""
    state = tmp_path / "state"
    share_kernels(state)
    (state / PORTS).write_text("{}")  # as an earlier one left it, which had its kernels compiled
    command = [SEALRING, "demo", "--nodes", "2", "--once", "--json", "--state-dir", state]
    done = subprocess.run(command, capture_output=True, check=True)
    shown = json.loads(done.stdout)
    wanted = {"answer", "prompt_tokens", "completion_tokens", "ttft_s", "tok_s", "suite", "min_trust", "ring"}
    assert wanted <= set(shown)
    assert "Paris" in shown["answer"]
    assert [member["rank"] for member in shown["ring"]] == [0, 1]
    layers = [member["layers"] for member in shown["ring"]]
    assert layers[0][0] == 0
    assert [low for low, _ in layers[1:]] == [high for _, high in layers[:-1]]
    assert shown["min_trust"] == "software"


@pytest.mark.parametrize(("blow", "nodes", "processes"), [(signal.SIGTERM, 1, 6), (signal.SIGKILL, 2, 10)])
def test_ending_the_demo_leaves_nothing_running(tmp_path, blow, nodes, processes):
    """In order from one node, of which a ring has no carrier; at once with all that there can be."""
    temporary, state = tmp_path / "tmp", tmp_path / "state"
    temporary.mkdir()
    command = [SEALRING, "demo", "--nodes", str(nodes)]
    if blow == signal.SIGKILL:
        share_kernels(state)
        (state / PORTS).write_text("{}")
        command += ["--state-dir", state]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            assert any(b"curl" in line for line in process.stdout), "it ended before it served"
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        finally:
            process.send_signal(blow)
            process.wait()
    # the command, coordinator, gateway, daemon, engine and carrier of each node, the head's chat template
    assert len(family) == processes
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family):
        time.sleep(0.05)  # until the test's time is over
    if blow != signal.SIGKILL:
        assert list(temporary.iterdir()) == []
