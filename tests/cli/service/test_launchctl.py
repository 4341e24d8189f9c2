"""The questions to launchctl and the use of its answers, which a stand-in on PATH gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.cli.service.launchctl import Launchctl, ServiceStatus
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition, PermissionDenied, SealringError

THERE = (0, "system/x = {\n\tstate = running\n\n\tpid = 4711\n\tlast exit code = (never exited)\n}\n", "")
GONE = (113, "", "Could not find service")
FINE = (0, "", "")
Answer = tuple[int, str, str]

STAND_IN = """#!/bin/sh
cd "{folder}" || exit 70
echo "$*" >> calls
first=$(ls | grep "^$1\\." | head -1)
[ -n "$first" ] || exit 0
cp "$first" taken
[ "$(ls | grep -c "^$1\\.")" = 1 ] || rm "$first"
. ./taken
"""


class Program:
    """The program, which answers each verb with what a test says, the last answer for ever."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder.parent / "bin").mkdir()
        program = folder.parent / "bin" / "launchctl"
        program.write_text(STAND_IN.format(folder=folder))
        program.chmod(0o755)

    def answer(self, verb: str, *answers: Answer) -> None:
        for number, (status, out, err) in enumerate(answers, 1):
            said = f"cat <<\\EOF\n{out}\nEOF\n" + (f"cat >&2 <<\\EOF\n{err}\nEOF\n" if err else "")
            (self._folder / f"{verb}.{number}").write_text(f"{said}exit {status}\n")

    @property
    def asked(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program(tmp_path / "answers")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return made


@pytest.fixture
def launchctl(program: Program, host: Any) -> Launchctl:
    return Launchctl(host)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (THERE, ServiceStatus("x", True, "running", 4711, "(never exited)")),
        ((0, "\tstate = not running\n\tlast exit code = 78: EX\n", ""),
         ServiceStatus("x", True, "not running", None, "78: EX")),
        (FINE, ServiceStatus("x", True, "unknown", None, "")),
        (GONE, ServiceStatus("x", False, "", None, "")),
        ((3, "", "No such process"), ServiceStatus("x", False, "", None, "")),
    ],
)  # fmt: skip
def test_what_launchd_says_of_a_service(
    program: Program, launchctl: Launchctl, said: Answer, status: ServiceStatus
) -> None:
    program.answer("print", said)
    assert launchctl.status("x") == status
    assert program.asked == ["print system/x"]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_service_is_loaded_once_and_enabled_whenever(
    program: Program, launchctl: Launchctl, loaded: bool
) -> None:
    program.answer("print", THERE if loaded else GONE)
    launchctl.bootstrap("x", Path("/x.plist"))
    loading = [] if loaded else ["bootstrap system /x.plist"]
    launchctl.kickstart("x")
    assert program.asked == ["enable system/x", "print system/x", *loading, "kickstart system/x"]


@pytest.mark.parametrize("told", [FINE, GONE, (36, "", "in progress")])
def test_a_service_is_waited_for_until_it_is_gone(
    program: Program, launchctl: Launchctl, host: Any, told: Answer
) -> None:
    program.answer("print", THERE, THERE, THERE, GONE)
    program.answer("bootout", told)
    launchctl.bootout("x")
    launchctl.bootout("x")
    verbs = [line.split()[0] for line in program.asked]
    assert verbs == ["print", "bootout", "print", "print", "print", "print"], "who is gone is not asked to go"
    assert host.passed == pytest.approx(0.4)


def test_a_service_that_does_not_end_is_not_waited_for_for_ever(
    program: Program, launchctl: Launchctl, host: Any
) -> None:
    program.answer("print", THERE)
    host.pause = lambda seconds: setattr(host, "passed", host.passed + 20)
    with pytest.raises(DeadlineExceeded) as raised:
        launchctl.bootout("x")
    assert (raised.value.reason, host.passed) == ("SERVICE_STILL_THERE", 80)


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((1, "", "Operation not permitted"), PermissionDenied, "is not allowed: Operation not permitted"),
        ((150, "", "Not permitted"), PermissionDenied, "is not allowed: Not permitted"),
        ((5, "", "Not permitted"), FailedPrecondition, "failed with 5: Not permitted"),
        ((5, "", "Try as ROOT"), PermissionDenied, "is not allowed: Try as ROOT"),
        ((5, "on stdout\nmore", ""), FailedPrecondition, "failed with 5: on stdout"),
        ((5, "on stdout", " on stderr \n"), FailedPrecondition, "failed with 5: on stderr"),
        ((5, "", " \n"), FailedPrecondition, "failed with 5: it said nothing"),
        ((9, "", "x" * 300), FailedPrecondition, f"failed with 9: {'x' * 200}"),
        ((113, "", "gone"), FailedPrecondition, "failed with 113: gone"),
    ],
)
def test_what_launchctl_refuses_is_told_in_its_words(
    program: Program, launchctl: Launchctl, answer: Answer, kind: type[SealringError], said: str
) -> None:
    program.answer("kickstart", answer)
    with pytest.raises(kind) as raised:
        launchctl.kickstart("x")
    assert raised.value.message == f"launchctl kickstart {said}"
