"""A confined process computes, answers and ends, and can do nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from sealring.mesh.errors import FailedPrecondition
from sealring.node.engine import confining, helper
from sealring.node.engine.confining import confine

HELD = {
    "reads a key": "open({file!r}).read()",
    "writes a file": "open({file!r} + '2', 'w')",
    "reads a folder": "os.listdir('/')",
    "looks at a file": "os.stat({file!r})",
    "connects": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "listens": "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "speaks to a neighbour": "socket.socketpair()",
    "starts a program": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "starts a process": "os._exit(0) if os.fork() == 0 else None",
    "ends its parent": "os.kill(os.getppid(), 0)",
    "has more descriptors": "os.dup(0)",
    "gets its limits back": "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))",
    "makes a pipe": "os.pipe()",
    "imports code": "import wave",
}
PROGRAM = """
import os, resource, signal, socket, sys, threading
from sealring.node.engine.confining import confine
begin, seen = threading.Event(), []
def other():
    begin.wait()
    try:
        {action}
    except (OSError, ValueError, ImportError):
        seen.append("held")
thread = threading.Thread(target=other)
thread.start()
confine(forks={forks})
if {in_another_thread}:
    begin.set()
    thread.join()
else:
    begin.set()
    thread.join()
    seen.clear()
    other()
print(*seen, flush=True)
os._exit(0)
"""
FORKS = """
import os
from sealring.node.engine.confining import confine
confine(forks=True)
if (child := os.fork()) == 0:
    try:
        open({file!r})
    except OSError:
        os._exit(3)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def said(program: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "identity.pem").write_text("secret")
    return tmp_path / "identity.pem"


@pytest.mark.parametrize("name", HELD)
def test_a_confined_process_can_do_nothing_else(key: Path, name: str) -> None:
    action = HELD[name].format(file=str(key))
    assert said(PROGRAM.format(action=action, forks=False, in_another_thread=False)) == "held"
    assert not key.with_name("identity.pem2").exists()


@pytest.mark.parametrize("name", ["reads a key", "listens", "ends its parent"])
def test_threads_that_run_already_are_confined_too(key: Path, name: str) -> None:
    """Libraries have begun some by then."""
    action = HELD[name].format(file=str(key))
    assert said(PROGRAM.format(action=action, forks=False, in_another_thread=True)) == "held"


def test_who_may_fork_has_confined_children(key: Path) -> None:
    assert said(FORKS.format(file=str(key))) == "3"


def test_a_process_that_cannot_be_confined_serves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose policy forbids filters: it says why, and sees no question of a stranger."""
    (tmp_path / "unheld.py").write_text(
        "import errno\n"
        "from sealring.node.engine import helper\n"
        "def refuse(**_): raise OSError(errno.EPERM, 'seccomp')\n"
        "helper.confine = refuse\n"
        "helper.serve(lambda question: {}, 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = set(psutil.Process().children())
    made = helper.Helpers("unheld", first={}, most=1)
    for ask in (made.prepare, lambda: made.ask({}, lambda answer: pytest.fail("it has answered"))):
        with pytest.raises(FailedPrecondition) as caught:
            ask()
        assert caught.value.reason == "NOT_CONFINED"
        assert "seccomp" in str(caught.value)
        assert caught.value.hint
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(("system", "machine"), [("freebsd14", "amd64"), ("linux", "riscv64")])
def test_where_nobody_knows_how_it_is_done_a_process_is_not_confined(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(confining.sys, "platform", system)
    monkeypatch.setattr(confining.platform, "machine", lambda: machine)
    with pytest.raises(OSError, match=f"{system}|{machine}"):
        confine()


@pytest.mark.skipif(sys.platform != "linux", reason="the headers are Linux's")
@pytest.mark.parametrize(
    ("place", "header", "define"),
    [
        (0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+)\s+(\d+)"),
        (1, "/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
    ],
    ids=["x86-64", "aarch64"],
)
def test_system_calls_have_the_numbers_of_the_kernels_headers(place: int, header: str, define: str) -> None:
    file = Path(header)
    if not file.exists():
        pytest.skip("the kernel's headers are not installed")
    known = {name: int(number) for name, number in re.findall(define, file.read_text())}
    for name, numbers in (confining.CALLS | confining.HELD_CALLS).items():
        assert known[name] == numbers[place], name
