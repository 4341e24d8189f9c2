"""`sealring service`: what launchd is asked for, in which order, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands import service
from sealring.cli.local import foreground
from sealring.cli.service import install
from sealring.cli.service.launchctl import ServiceStatus
from sealring.cli.service.launchd import Service
from sealring.mesh.errors import ConfigError

PLIST = "Library/LaunchDaemons/org.sealring.node.plist"
RULES = "etc/newsyslog.d/org.sealring.node.conf"


class Control:
    """launchd, which notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def bootstrap(self, label: str, plist: Path) -> None:
        self.asked.append(("bootstrap", label, plist))

    def bootout(self, label: str) -> None:
        self.asked.append(("bootout", label))

    def kickstart(self, label: str) -> None:
        self.asked.append(("kickstart", label))

    def status(self, label: str) -> ServiceStatus:
        loaded = label.endswith("node")
        return ServiceStatus(label, loaded, "running" if loaded else "", 7 if loaded else None, "0" * loaded)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    made = Control()
    monkeypatch.setattr(service, "Launchctl", lambda: made)
    return made


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Below it the node is installed."""
    for file in (PLIST, RULES):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    return tmp_path


def test_a_service_is_started_stopped_and_begun_again(here: Any, control: Control, prefix: Path) -> None:
    label, at = "org.sealring.node", ("--prefix", str(prefix))
    load = [("bootstrap", label, prefix / PLIST), ("kickstart", label)]
    for verb, more, asked, said in (
        ("start", at, load, "started"),
        ("stop", (), [("bootout", label)], "stopped"),
        ("restart", at, [("bootout", label), *load], "restarted"),
    ):
        control.asked.clear()
        done = here("service", verb, "node", *more)
        assert (done.status, done.err, control.asked) == (0, f"{said} {label}\n", asked)


def test_what_is_not_installed_is_not_begun_and_what_runs_goes_on(
    here: Any, control: Control, prefix: Path
) -> None:
    for verb in ("start", "restart"):
        done = here("service", verb, "gateway", "--prefix", str(prefix))
        assert (done.status, "[SERVICE_NOT_INSTALLED]" in done.err) == (3, True)
        assert "hint: sealring service install gateway" in done.err
    assert control.asked == []


def test_a_service_is_removed_with_its_rules_and_as_often_as_one_likes(
    here: Any, control: Control, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        done = here("service", "uninstall", "node", "--prefix", str(prefix))
        assert done.err == "removed org.sealring.node\n"
        assert not (prefix / PLIST).exists()
        assert not (prefix / RULES).exists()
    assert control.asked == [("bootout", "org.sealring.node")] * 2

    def refuse(file: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    done = here("service", "uninstall", "node", "--prefix", str(prefix))
    assert (done.status, "[NEEDS_ROOT]" in done.err) == (6, True)


def test_what_launchd_knows_of_all_services_or_of_one(here: Any, control: Control) -> None:
    rows = [line.split() for line in here("service", "status").out.splitlines()]
    assert rows == [
        ["service", "state", "pid", "last", "exit"],
        ["org.sealring.coordinator", "not", "loaded", "-", "-"],
        ["org.sealring.node", "running", "7", "0"],
        ["org.sealring.gateway", "not", "loaded", "-", "-"],
    ]
    (told,) = here("service", "status", "node", "--json").data
    assert told == {
        "label": "org.sealring.node", "loaded": True, "state": "running", "pid": 7, "last_exit": "0"
    }  # fmt: skip
    assert len(here("service", "status", "--json").data) == 3


@pytest.mark.parametrize(
    ("options", "found", "adopted"),
    [
        ((), ("/home/me/state", 501), (Path("/home/me/state"), 501)),
        ((), None, (None, None)),
        (("--adopt", "/old"), ("/home/me/state", 501), (Path("/old"), None)),
    ],
)
def test_what_is_installed_takes_over_what_was_named_or_the_callers_own(
    here: Any,
    control: Control,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    found: tuple[str, int] | None,
    adopted: tuple[Path | None, int | None],
) -> None:
    made: list[Any] = []

    class Installation:
        def __init__(self, *of: Any, **how: Any) -> None:
            made.append((of, how))

        def run(self, say: Any, **how: Any) -> None:
            made.append(how)

    monkeypatch.setattr(install, "Installation", Installation)
    monkeypatch.setattr(install, "users_state", lambda _: found and (Path(found[0]), found[1]))
    monkeypatch.setattr(service, "program", lambda: "/bin/sealring")
    caught: list[str] = []
    monkeypatch.setattr(foreground, "signals_as_exceptions", lambda: caught.append("signals"))
    done = here("service", "install", "node", *options)
    assert done.status == 0, done.err
    here("service", "install", "node", "--user", "me", "--config", "s.toml", "--no-start", "--dry-run")
    first, how, second, otherwise = made
    assert caught == ["signals"] * 2, "what ends it undoes what was begun"
    assert first == (
        (control, Service("node", program="/bin/sealring"), Path("/")),
        {"adopt": adopted[0], "user": adopted[1]},
    )
    own = Service("node", program="/bin/sealring", user="me", config=str(home / "s.toml"))
    assert second[0][1] == own
    assert (how, otherwise) == ({"start": True, "dry_run": False}, {"start": False, "dry_run": True})


def test_the_program_is_the_one_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of PATH, which may be anybody's."""
    monkeypatch.setattr(service.sysconfig, "get_path", lambda name: {"scripts": str(tmp_path)}[name])
    script = tmp_path / "sealring"
    for mode in (None, 0o644):
        if mode is not None:
            script.touch(mode)
        with pytest.raises(ConfigError) as raised:
            service.program()
        assert raised.value.reason == "NO_PROGRAM"
    script.chmod(0o755)
    assert service.program() == str(script)
    assert os.access(service.program(), os.X_OK)
