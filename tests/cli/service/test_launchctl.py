"""What launchctl is asked, and what is made of its answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.service import launchctl
from sealring.cli.service.launchctl import Launchctl, ServiceStatus
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition, PermissionDenied, SealringError

THERE = (0, "system/x = {\n\tstate = running\n\n\tpid = 4711\n\tlast exit code = (never exited)\n}\n", "")
GONE = (113, "", "Could not find service")
FINE = (0, "", "")
Answer = tuple[int, str, str]


class Launchd:
    """Answers with what a test says, the last of it for ever; its clock goes on while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[Answer | None]] = {}
        self.asked: list[list[str]] = []
        self.now = 0.0
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(launchctl.subprocess, "run", self.run)
        self.control = Launchctl(clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, command: list[str], **options: Any) -> Any:
        assert command[0] == "/bin/launchctl"
        assert options == {
            "capture_output": True, "text": True, "errors": "replace", "timeout": 30.0, "check": False
        }  # fmt: skip
        self.asked.append(command[1:])
        answers = self.answers.get(command[1], [FINE])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise subprocess.TimeoutExpired(command, 30.0)
        return subprocess.CompletedProcess(command, *answer)


@pytest.fixture
def launchd(monkeypatch: pytest.MonkeyPatch) -> Launchd:
    return Launchd(monkeypatch)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (THERE, ServiceStatus("x", True, "running", 4711, "(never exited)")),
        ((0, "\tstate = not running\n\tlast exit code = 78: EX\n", ""),
         ServiceStatus("x", True, "not running", None, "78: EX")),
        ((0, "", ""), ServiceStatus("x", True, "unknown", None, "")),
        (GONE, ServiceStatus("x", False, "", None, "")),
        ((3, "", "No such process"), ServiceStatus("x", False, "", None, "")),
    ],
)  # fmt: skip
def test_what_launchd_says_of_a_service(launchd: Launchd, said: Answer, status: ServiceStatus) -> None:
    launchd.answers["print"] = [said]
    assert launchd.control.status("x") == status
    assert launchd.asked == [["print", "system/x"]]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_service_is_loaded_once_and_enabled_whenever(launchd: Launchd, loaded: bool) -> None:
    launchd.answers["print"] = [THERE if loaded else GONE]
    launchd.control.bootstrap("x", Path("/x.plist"))
    loading = [] if loaded else [["bootstrap", "system", "/x.plist"]]
    assert launchd.asked == [["enable", "system/x"], ["print", "system/x"], *loading]
    launchd.control.kickstart("x")
    assert launchd.asked[-1] == ["kickstart", "system/x"]


@pytest.mark.parametrize("told", [FINE, GONE, (3, "", "No such process"), (36, "", "in progress")])
def test_a_service_is_waited_for_until_it_is_gone(launchd: Launchd, told: Answer) -> None:
    launchd.answers |= {"print": [THERE, THERE, THERE, GONE], "bootout": [told]}
    launchd.control.bootout("x")
    assert [verb for verb, _ in launchd.asked] == ["print", "bootout", "print", "print", "print"]
    assert launchd.now == pytest.approx(0.4)
    launchd.control.bootout("x")
    assert [verb for verb, _ in launchd.asked][5:] == ["print"], "who is gone is not asked to go"


def test_a_service_that_does_not_end_is_not_waited_for_for_ever(
    launchd: Launchd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchctl, "_POLL_SECONDS", 0.25)
    launchd.answers["print"] = [THERE]
    with pytest.raises(DeadlineExceeded) as raised:
        launchd.control.bootout("x")
    assert raised.value.reason == "SERVICE_STILL_THERE"
    assert launchd.now == 60.25


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((1, "", "Operation not permitted"), PermissionDenied, "is not allowed: Operation not permitted"),
        ((150, "", "Not permitted"), PermissionDenied, "is not allowed: Not permitted"),
        ((5, "", "Not permitted"), FailedPrecondition, "failed with 5: Not permitted"),
        ((1, "", "another"), FailedPrecondition, "failed with 1: another"),
        ((5, "", "Try as ROOT"), PermissionDenied, "is not allowed: Try as ROOT"),
        ((5, "on stdout\nmore", ""), FailedPrecondition, "failed with 5: on stdout"),
        ((5, "on stdout", " on stderr \n"), FailedPrecondition, "failed with 5: on stderr"),
        ((5, "", " \n"), FailedPrecondition, "failed with 5: it said nothing"),
        ((-9, "", "x" * 300), FailedPrecondition, f"failed with -9: {'x' * 200}"),
        ((113, "", "gone"), FailedPrecondition, "failed with 113: gone"),
        (None, DeadlineExceeded, "did not answer"),
    ],
)
def test_what_launchctl_refuses_is_told_in_its_words(
    launchd: Launchd, answer: Answer | None, kind: type[SealringError], said: str
) -> None:
    launchd.answers["kickstart"] = [answer]
    with pytest.raises(kind) as raised:
        launchd.control.kickstart("x")
    assert raised.value.message == f"launchctl kickstart {said}"


def test_only_macs_have_launchd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FailedPrecondition) as raised:
        Launchctl()
    assert raised.value.reason == "NOT_MACOS"
