"""Under Darwin's conditions (tests/support/darwin.py): they hold, and the parts that meet them work.

`make darwin` runs the integration tests so, and `make darwin POSE=1` in processes that pose as a Mac's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import darwin
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="imposed on Linux; a Mac has them")

ROOT = Path(__file__).parents[1]
PARTS = (
    "tests/node/wire/test_channel.py",
    "tests/node/daemon/test_supervisor.py::test_what_a_child_started_ends_with_it",
    "tests/node/daemon/test_supervisor.py::test_a_child_that_does_not_read_pushes_back",
    "tests/node/daemon/test_supervisor.py::test_the_end_of_a_child_is_told_once",
    "tests/node/carrier/test_ring.py",
    "tests/node/carrier/test_carrier.py::test_records_go_round_the_ring[2]",
    "tests/node/daemon/test_carrier_process.py",
    "tests/mesh/system/test_processes.py",
    "tests/mesh/system/test_files.py",
    "tests/mesh/system/test_addresses.py",
)
POSED_PARTS = (
    "tests/cli/test_transcripts.py",
    "tests/cli/commands/test_join.py",
    "tests/cli/commands/test_doctor.py",
    "tests/cli/commands/test_up.py",
    "tests/client/test_openai.py::test_answers_are_sealed_whole_and_streamed",
    "tests/node/daemon/test_awake.py",
    "tests/node/identity/test_choice.py",
)
"""Tests of code that asks on which system it runs: in processes that take themselves for a Mac's."""
PROBE = """
import errno, fcntl, json, os, resource, select, signal, socket, subprocess, sys, time
os.environ.pop("GRPC_ENABLE_FORK_SUPPORT", None)
try:
    import grpc
except ImportError as error:
    handlers = str(error)
from pathlib import Path
import psutil

def refusal(work, *arguments):
    try:
        work(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]

found = {"handlers": "handlers of fork()" in handlers, "vfork": subprocess._USE_VFORK}
left, right = socket.socketpair()
left.setblocking(False)
found["grown"] = refusal(left.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
held = 0
while refusal(left.send, bytes(78)) is None:
    held += 78
found["held"] = held
child = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
found["zombie"] = refusal(os.killpg, child.pid, signal.SIGKILL)
child.wait()
found["gone"] = refusal(os.killpg, child.pid, signal.SIGKILL)
found["proc"] = [
    refusal(work, path)
    for work, path in ((open, "/proc/self/maps"), (os.listdir, "/proc/self/fd"), (os.stat, "/proc"))
] + [os.path.exists("/proc"), Path("/proc/net/tcp").is_file()]
found["psutil"] = psutil.Process().num_fds() >= 3
found["linux"] = [name for name in ("memfd_create", "pidfd_open", "sched_getaffinity") if hasattr(os, name)]
with socket.socket() as bound, socket.socket() as caller:
    bound.bind(("127.0.0.1", 0))
    caller.setblocking(False)
    found["bound"] = errno.errorcode[caller.connect_ex(bound.getsockname())]
    poll = select.poll()
    poll.register(caller, select.POLLOUT)
    found["answered"] = bool(poll.poll(50))
    bound.listen()
    with socket.create_connection(bound.getsockname()) as heard:
        visitor, _ = bound.accept()
        visitor.sendall(b"12345")
        heard.recv(5, socket.MSG_WAITALL)
        found["received"] = int.from_bytes(heard.getsockopt(socket.IPPROTO_TCP, 0x106, 112)[88:96], "little")
        visitor.close()
    address = bound.getsockname()
with socket.socket() as caller:
    found["unbound"] = errno.errorcode[caller.connect_ex(address)]
with open(sys.argv[1], "w") as file:
    begun = time.monotonic()
    found["full sync"] = refusal(fcntl.fcntl, file.fileno(), fcntl.F_FULLFSYNC)
    found["at once"] = time.monotonic() - begun < 0.02
try:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
except ValueError:
    found["address space"] = "EINVAL"
private = Path(sys.argv[1]).with_name("Documents")
os.mkdir(private)
found["private"] = [
    refusal(work, path)
    for work, path in ((os.listdir, private), (os.stat, private / "config.json"), (open, private / "a"))
]
import mlx.core as mx
found["freed buffers"] = mx.set_cache_limit(1)
import darwin
before = time.time(), time.clock_gettime(time.CLOCK_MONOTONIC), time.monotonic()
darwin.sleep(3600)
after = time.time(), time.clock_gettime(time.CLOCK_MONOTONIC), time.monotonic()
found["slept"] = [right - left >= 3600 for left, right in zip(before, after)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return darwin.make(tmp_path_factory.mktemp("darwin") / "environment")


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = 'ulimit -S -n 256; exec "$@"'
    return subprocess.run(
        ["/bin/sh", "-c", command, "sh", str(python), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_conditions_hold(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", PROBE, str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert 0 < found.pop("held") <= darwin.PAIR_BYTES
    assert found == {
        "handlers": True,
        "vfork": False,
        "grown": "ENOBUFS",
        "zombie": "EPERM",
        "gone": "ESRCH",
        "proc": ["ENOENT", "ENOENT", "ENOENT", False, False],
        "psutil": True,
        "linux": [],
        "bound": "EINPROGRESS",
        "answered": False,
        "received": 5,
        "unbound": "ECONNREFUSED",
        "full sync": None,
        "at once": False,
        "address space": "EINVAL",
        "private": ["EPERM"] * 3,
        "freed buffers": darwin.METAL_CACHE_BYTES,
        "slept": [True, True, False],
    }


def test_the_parts_that_meet_them_work(python: Path) -> None:
    check(python, PARTS)


def test_the_parts_that_know_a_mac_work_on_what_poses_as_one(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests keep their files in folders of theirs on any system, and none in the tester's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    posing = darwin.make(tmp_path / "environment", pose=True)
    assert run(posing, "-c", "import sys; print(sys.platform)").stdout == "darwin\n"
    check(posing, POSED_PARTS)
    assert not (tmp_path / "Library").exists()
    assert not list(tmp_path.glob(".*"))


def check(python: Path, parts: tuple[str, ...]) -> None:
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parts)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
