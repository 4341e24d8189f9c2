from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.launchctl import Launchctl
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition

LABEL = "org.sealring.node"
TARGET = f"system/{LABEL}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def service(here: Any, launchctl: Any, root: Path) -> Any:
    def run(verb: str, *arguments: str) -> Any:
        rooted = [] if verb in ("stop", "status") else ["--root", str(root)]
        return here("service", verb, *arguments, *rooted, PATH=launchctl.path)

    return run


def test_off_macos_it_says_so(here: Any, tmp_path: Path) -> None:
    done = here("service", "status", PATH=str(tmp_path))
    assert done.status == 7
    assert "only macOS has" in done.err
    assert "NOT_MACOS" in done.err


def test_a_life_from_install_to_uninstall(service: Any, launchctl: Any, root: Path) -> None:
    done = service("install", "node", "--user", "me", "--config", "/etc/sealring.toml")
    assert done.status == 0, done.err
    plist = root / "Library" / "LaunchDaemons" / f"{LABEL}.plist"
    content = plistlib.loads(plist.read_bytes())
    assert content["UserName"] == "me"
    assert content["ProgramArguments"][1:5] == ["--config", "/etc/sealring.toml", "node", "run"]
    assert plist.stat().st_mode & 0o777 == 0o644
    rules = root / "etc" / "newsyslog.d" / f"{LABEL}.conf"
    assert "/var/log/sealring/node.log\tme:wheel" in rules.read_text()
    assert launchctl.calls[-2:] == [["print", TARGET], ["bootstrap", "system", str(plist)]]
    assert launchctl.verbs() == ["enable", "bootstrap"]

    shown = service("status", "node", "--json").data
    assert shown == [
        {"label": LABEL, "loaded": True, "state": "running", "pid": 4711, "last_exit": "(never exited)"}
    ]
    assert "not loaded" in service("status").out

    assert service("restart", "node").status == 0
    assert launchctl.verbs()[2:] == ["bootout", "enable", "bootstrap", "kickstart"]
    assert service("stop", "node").status == 0
    assert service("status", "node", "--json").data[0]["loaded"] is False
    assert service("stop", "node").status == 0
    assert launchctl.verbs()[6:] == ["bootout"]
    assert service("start", "node").status == 0
    assert launchctl.verbs()[7:] == ["enable", "bootstrap", "kickstart"]

    assert service("uninstall", "node").status == 0
    assert not plist.exists()
    assert not rules.exists()
    missing = service("start", "node")
    assert missing.status == 3
    assert "sealring service install node" in missing.err


def test_an_install_touches_no_other_components_files(service: Any, root: Path) -> None:
    assert service("install", "node", "--user", "one", "--no-start").status == 0
    assert service("install", "gateway", "--user", "two", "--no-start").status == 0
    folder = root / "etc" / "newsyslog.d"
    assert "node.log\tone:wheel" in (folder / "org.sealring.node.conf").read_text()
    rules = (folder / "org.sealring.gateway.conf").read_text()
    assert "gateway.log\ttwo:wheel" in rules
    assert "node.log" not in rules


def test_a_link_in_the_place_of_a_log_is_refused(service: Any, launchctl: Any, root: Path) -> None:
    log = root / "var" / "log" / "sealring" / "node.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/etc/passwd")
    done = service("install", "node")
    assert done.status == 7
    assert "UNSAFE_PLACE" in done.err
    assert not (root / "Library").exists()
    assert launchctl.calls == []


def test_logs_shows_the_end(service: Any, root: Path) -> None:
    assert service("logs", "node").status == 3
    log = root / "var" / "log" / "sealring" / "node.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(500)))
    assert service("logs", "node", "-n", "2").out == "line 498\nline 499\n"


def test_without_rights_it_says_sudo(service: Any, launchctl: Any) -> None:
    launchctl.fail("enable", 1, "Could not enable service: 1: Operation not permitted")
    done = service("install", "node")
    assert done.status == 6
    assert "run it with sudo" in done.err


def test_what_launchctl_says_is_passed_on(service: Any, launchctl: Any) -> None:
    launchctl.fail("bootstrap", 5, "Bootstrap failed: 5: Input/output error")
    done = service("install", "node")
    assert done.status == 7
    assert "Bootstrap failed: 5" in done.err


def test_bootout_is_awaited(launchctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", launchctl.path)
    slept: list[float] = []
    control = Launchctl(sleep=slept.append)
    (launchctl.folder / "loaded" / LABEL).write_text("0")
    control.bootout(LABEL)
    assert len(slept) == 2
    assert not control.status(LABEL).loaded


def test_a_service_that_does_not_end_is_reported(launchctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", launchctl.path)
    (launchctl.folder / "loaded" / LABEL).write_text("0")
    launchctl.fail("bootout", 36, "Operation now in progress")
    times = iter([0.0, 1.0, 1000.0])
    with pytest.raises(DeadlineExceeded) as caught:
        Launchctl(clock=lambda: next(times), sleep=lambda seconds: None).bootout(LABEL)
    assert caught.value.reason == "SERVICE_STILL_THERE"


def test_kickstart_can_kill(launchctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", launchctl.path)
    (launchctl.folder / "loaded" / LABEL).write_text("0")
    Launchctl().kickstart(LABEL, kill=True)
    assert launchctl.calls[-1] == ["kickstart", "-k", TARGET]
    with pytest.raises(FailedPrecondition):
        Launchctl().kickstart("org.sealring.gateway", kill=False)
