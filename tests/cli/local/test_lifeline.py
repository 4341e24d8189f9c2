from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.local import lifeline
from sealring.cli.local.lifeline import die_with_parent
from sealring.mesh.errors import InvalidInput

CHILD = """
import signal, sys, time
from sealring.cli.local.lifeline import die_with_parent
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(0)))
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
read_end, write_end = os.pipe()
command = [sys.executable, "-c", {child!r}, str(read_end)]
child = subprocess.Popen(command, pass_fds=[read_end], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    code = textwrap.dedent(PARENT).format(child=CHILD)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    assert "up" in lines
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "told\n"
    parent.stdout.close()
    pid = int(next(line for line in lines if line != "up"))
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_who_does_not_end_when_told_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *of: did.append(of))
    monkeypatch.setattr(os, "_exit", did.append)
    monkeypatch.setattr(lifeline, "time", SimpleNamespace(sleep=did.append))
    read_end, write_end = os.pipe()
    os.write(write_end, b"what a parent may write means nothing")
    os.close(write_end)
    lifeline._watch(read_end)
    os.close(read_end)
    assert did == [(os.getpid(), signal.SIGTERM), 8.0, 1]


def test_only_a_pipe_will_do(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(InvalidInput) as caught:
        die_with_parent(file.fileno())
    assert caught.value.reason == "BAD_DESCRIPTOR"
    with pytest.raises(InvalidInput):
        die_with_parent(987)


def test_the_descriptor_goes_to_no_grandchild() -> None:
    code = textwrap.dedent(
        """
        import os, sys
        from sealring.cli.local.lifeline import die_with_parent
        die_with_parent(int(sys.argv[1]))
        print(os.get_inheritable(int(sys.argv[1])))
        """
    )
    read_end, write_end = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", code, str(read_end)],
        pass_fds=[read_end],
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(read_end)
    os.close(write_end)
    assert done.stdout == "False\n"
    assert done.returncode in (0, -signal.SIGTERM)
