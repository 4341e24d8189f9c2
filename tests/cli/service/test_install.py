from __future__ import annotations

import os
import plistlib
import pwd
import signal
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.service import install
from sealring.cli.service.install import (
    Installation,
    Step,
    account_id,
    run_steps,
    users_state,
    wait_until_up,
)
from sealring.cli.service.launchctl import Launchctl, ServiceStatus
from sealring.cli.service.launchd import Service
from sealring.mesh.errors import ConfigError, DeadlineExceeded, FailedPrecondition
from sealring.mesh.member.bootstrap import JoinToken
from sealring.mesh.system.addresses import free_port
from sealring.mesh.system.lock import lock_state
from sealring.mesh.system.paths import state_root_of

LABEL = "org.sealring.node"
TARGET = f"system/{LABEL}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def state(root: Path) -> Path:
    """Of a node that has joined in the place where the service looks."""
    return join(root / "var" / "db" / "sealring" / "node")


def join(folder: Path) -> Path:
    """A node's state folder, and beside it what the node was set to."""
    folder.mkdir(parents=True, mode=0o700)
    (folder.parent / "config").mkdir()
    (folder.parent / "config" / "node.toml").write_text(
        f'[node]\nstate_dir = "{folder}"\nlisten = "127.0.0.1:{free_port()}"\nring_host = "127.0.0.1"\n'
    )
    (folder / "member.json").write_text("{}")
    (folder / "identity.key").write_text("a key")
    return folder


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Services come up at once; what was waited for."""
    waited: list[Any] = []
    monkeypatch.setattr("sealring.cli.service.install.wait_until_up", lambda *of: waited.append(of[1:3]))
    monkeypatch.delenv("SUDO_USER", raising=False)
    return waited


@pytest.fixture
def service(here: Any, launchctl: Any, root: Path, up: list[Any]) -> Any:
    def run(verb: str, *arguments: str) -> Any:
        rooted = [] if verb in ("stop", "status") else ["--prefix", str(root)]
        return here("service", verb, *arguments, *rooted, PATH=launchctl.path)

    return run


def test_off_macos_it_says_so(here: Any, tmp_path: Path) -> None:
    done = here("service", "status", PATH=str(tmp_path))
    assert done.status == 7
    assert "only macOS has" in done.err
    assert "NOT_MACOS" in done.err


def test_a_life_from_install_to_uninstall(
    service: Any, launchctl: Any, root: Path, state: Path, up: list[Any]
) -> None:
    settings = root / "sealring.toml"
    settings.write_text('[node]\nlisten = "127.0.0.1:1"\n')
    done = service("install", "node", "--user", "me", "--config", str(settings))
    assert done.status == 0, done.err
    assert up == [(LABEL, ("127.0.0.1", 1))]
    plist = root / "Library" / "LaunchDaemons" / f"{LABEL}.plist"
    content = plistlib.loads(plist.read_bytes())
    assert content["UserName"] == "me"
    assert content["ProgramArguments"][1:5] == ["--config", str(settings), "node", "run"]
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


def test_a_link_in_the_place_of_a_log_is_refused(
    service: Any, launchctl: Any, root: Path, state: Path
) -> None:
    log = root / "var" / "log" / "sealring" / "node.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/etc/passwd")
    done = service("install", "node")
    assert done.status == 7
    assert "UNSAFE_PLACE" in done.err
    assert not (root / "Library").exists()
    assert launchctl.verbs() == []


def test_without_rights_it_says_sudo(service: Any, launchctl: Any, state: Path) -> None:
    launchctl.fail("enable", 1, "Could not enable service: 1: Operation not permitted")
    done = service("install", "node")
    assert done.status == 6
    assert "run it with sudo" in done.err


def test_what_launchctl_says_is_passed_on(service: Any, launchctl: Any, state: Path) -> None:
    launchctl.fail("bootstrap", 5, "Bootstrap failed: 5: Input/output error")
    done = service("install", "node")
    assert done.status == 7
    assert "Bootstrap failed: 5" in done.err


def test_what_has_not_joined_is_not_installed(service: Any, launchctl: Any, root: Path) -> None:
    done = service("install", "node")
    assert done.status == 7
    assert "sudo sealring join --service" in done.err
    assert launchctl.verbs() == []
    assert list(root.iterdir()) == []


def test_the_users_state_and_settings_are_taken_over(service: Any, root: Path, home: Path) -> None:
    own = join(home / ".local" / "state" / "sealring" / "node")
    before = tomllib.loads((own.parent / "config" / "node.toml").read_text())["node"]
    said = service("install", "node", "--dry-run")
    assert said.status == 0, said.err
    assert f"would copy the state in {own} there" in said.err
    assert f"would remove {own}" in said.err
    assert [one.name for one in root.iterdir()] == []
    done = service("install", "node")
    assert done.status == 0, done.err
    there = root / "var" / "db" / "sealring"
    assert (there / "node" / "identity.key").read_text() == "a key"
    assert not own.exists(), "there are no two machines with one identity"
    settings = tomllib.loads((there / "config" / "node.toml").read_text())
    assert settings == {"node": {name: before[name] for name in ("listen", "ring_host")}}
    plist = plistlib.loads((root / "Library" / "LaunchDaemons" / f"{LABEL}.plist").read_bytes())
    assert plist["ProgramArguments"][1:3] == ["--config", "/var/db/sealring/config/node.toml"]


def test_state_in_use_is_not_taken_over(service: Any, root: Path, home: Path) -> None:
    with lock_state(join(home / "mine")):
        done = service("install", "node", "--adopt", str(home / "mine"))
    assert "STATE_IN_USE" in done.err
    assert list(root.iterdir()) == []


def test_what_does_not_come_up_is_put_back(
    service: Any, launchctl: Any, root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_of: Any) -> None:
        raise FailedPrecondition("it ended with status 7", reason="SERVICE_DID_NOT_START")

    own = join(home / "mine")
    plist = root / "Library" / "LaunchDaemons" / f"{LABEL}.plist"
    plist.parent.mkdir(parents=True)
    plist.write_bytes(plistlib.dumps({"Label": LABEL}))
    (launchctl.folder / "loaded" / LABEL).write_text("0")
    monkeypatch.setattr("sealring.cli.service.install.wait_until_up", fail)
    done = service("install", "node", "--adopt", str(own))
    assert done.status == 7
    assert "SERVICE_DID_NOT_START" in done.err
    assert (own / "identity.key").read_text() == "a key"
    assert not (root / "var" / "db" / "sealring" / "node").exists()
    assert not list((root / "etc" / "newsyslog.d").iterdir())
    assert plistlib.loads(plist.read_bytes()) == {"Label": LABEL}, "the one that was there before"
    assert launchctl.verbs()[-2:] == ["enable", "bootstrap"], "and it runs again"
    assert (launchctl.folder / "loaded" / LABEL).exists()


@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_the_service_has_already_is_neither_replaced_nor_removed(
    service: Any, launchctl: Any, root: Path, home: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    if meanwhile:
        monkeypatch.setattr(Installation, "check", lambda *_of, **_how: None)
    own = join(home / "mine")
    there = root / "var" / "db" / "sealring" / "node"
    there.mkdir(parents=True)
    (there / "identity.key").write_text("the key of a join that did not end")
    done = service("install", "node", "--adopt", str(own))
    assert done.status == 7
    assert "STATE_IN_THE_WAY" in done.err
    assert (there / "identity.key").read_text() == "the key of a join that did not end"
    assert (own / "identity.key").read_text() == "a key"
    assert launchctl.verbs() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_undoes_what_was_begun(
    service: Any, root: Path, home: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = signal.signal(number, lambda *_of: None)
    monkeypatch.setattr(
        "sealring.cli.service.install.wait_until_up", lambda *_of: signal.raise_signal(number)
    )
    try:
        done = service("install", "node", "--adopt", str(join(home / "mine")))
    finally:
        signal.signal(number, before)
    assert done.status == 128 + number
    assert (home / "mine" / "identity.key").exists()
    assert not (root / "var" / "db" / "sealring" / "node").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_state_of_somebody_else_is_not_taken_over_by_a_link(
    service: Any, root: Path, home: Path, tmp_path: Path
) -> None:
    others = join(tmp_path / "others" / "sealring" / "node")
    (home / ".local").mkdir()
    (home / ".local" / "state").symlink_to(tmp_path / "others")
    os.chown(others, 64_002, -1)
    assert "UNSAFE_STATE" in service("install", "node").err
    assert list(root.iterdir()) == []
    os.chown(others, os.geteuid(), -1)
    assert service("install", "node").status == 0


def test_a_helper_that_others_can_change_is_not_run_by_the_service(
    service: Any, root: Path, home: Path, tmp_path: Path
) -> None:
    own = join(home / "mine")
    settings = own.parent / "config" / "node.toml"
    given = settings.read_text()
    helper = tmp_path / "sealring-enclave"
    helper.touch(mode=0o777)
    helper.chmod(0o777)
    settings.write_text(f'{given}enclave_helper = "{helper}"\n')
    assert "UNSAFE_PLACE" in service("install", "node", "--adopt", str(own)).err
    assert list(root.iterdir()) == []
    settings.write_text(f'{given}enclave_helper = "{tmp_path}/none"\n')
    assert "UNSAFE_PLACE" in service("install", "node", "--adopt", str(own)).err
    settings.write_text(f'{given}enclave_helper = "/bin/sh"\n')
    assert service("install", "node", "--adopt", str(own)).status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root tries as another account")
def test_a_model_folder_that_the_account_may_not_enter_is_named_before_anything_is_done(
    root: Path, tmp_path: Path
) -> None:
    """As a user's home folder; tried as the account, for root may enter everything."""
    control: Any = None
    closed = tmp_path / "home" / "models"
    closed.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)

    def check(*folders: Path) -> None:
        chosen = {"models": [str(folder) for folder in folders]}
        Installation(control, Service("node", user="nobody"), root, chosen=chosen).check(start=False)

    check(Path("/"), tmp_path / "missing")
    with pytest.raises(FailedPrecondition) as raised:
        check(Path("/"), closed)
    assert raised.value.reason == "MODEL_FOLDER_UNREADABLE"
    assert (str(closed) in raised.value.message, "home folders" in raised.value.hint) == (True, True)


def test_a_service_that_ran_before_a_join_that_fails_runs_again(
    here: Any, launchctl: Any, root: Path, home: Path, up: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the join was good and only the start failed."""

    def fail(*_of: Any) -> None:
        raise FailedPrecondition("it ended with status 7", reason="SERVICE_DID_NOT_START")

    def enrol_as(_user: Any, above: Path, *_of: Any) -> dict[str, Any]:
        (above / "node" / "member.json").write_text("{}")
        settings = {"listen": f"127.0.0.1:{free_port()}"}
        return {"settings": settings, "said": [], "cluster": "c", "name": "n", "level": "software"}

    token = JoinToken.generate(bytes(32), ["127.0.0.1:1"]).format()
    plist = root / "Library" / "LaunchDaemons" / f"{LABEL}.plist"
    plist.parent.mkdir(parents=True)
    plist.write_bytes(plistlib.dumps({"Label": LABEL}))
    (launchctl.folder / "loaded" / LABEL).write_text("0")
    monkeypatch.setattr("sealring.cli.service.install.wait_until_up", fail)
    monkeypatch.setattr("sealring.cli.setup.enrol.enrol_as", enrol_as)
    options = ("--service", "--user", "me", "--prefix", str(root))
    done = here("join", token, *options, PATH=launchctl.path)
    assert "SERVICE_DID_NOT_START" in done.err
    assert plistlib.loads(plist.read_bytes()) == {"Label": LABEL}
    assert (launchctl.folder / "loaded" / LABEL).exists()


def test_an_address_in_use_is_named_before_anything_is_done(
    service: Any, launchctl: Any, root: Path, home: Path
) -> None:
    own = join(home / "mine")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = home / "s.toml"
        file.write_text(f'[node]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n')
        done = service("install", "node", "--adopt", str(own), "--config", str(file))
    assert "ADDRESS_IN_USE" in done.err
    assert launchctl.verbs() == []
    assert own.exists()


def test_a_missing_account_comes_with_the_command_that_makes_it(here: Any, launchctl: Any) -> None:
    done = here("service", "install", "node", "--user", "_nobody_has_this", PATH=launchctl.path)
    assert done.status == 7
    assert "sudo sysadminctl -addUser _nobody_has_this -roleAccount -UID " in done.err


class Told:
    """launchd, as it would answer."""

    def __init__(self, **status: Any) -> None:
        self.now = ServiceStatus(LABEL, loaded=True, **status)

    def status(self, label: str) -> ServiceStatus:
        return self.now


def test_up_is_a_process_and_somebody_who_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "node.log"
    log.write_text("NOT_ENROLLED\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = ("127.0.0.1", listening.getsockname()[1])
        wait_until_up(Told(pid=1, last_exit="(never exited)"), LABEL, address, log)  # type: ignore[arg-type]
        with pytest.raises(FailedPrecondition) as ended:
            wait_until_up(Told(last_exit="7: EX"), LABEL, address, log)  # type: ignore[arg-type]
    assert "it ended with status 7: EX;" in ended.value.message
    assert "NOT_ENROLLED" in ended.value.message
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(install, "time", clock)
    monkeypatch.setattr(install, "_POLL_SECONDS", 0.25)
    with pytest.raises(FailedPrecondition, match=r"did not listen at 127\.0\.0\.1:1 within 60 s"):
        wait_until_up(Told(pid=1), LABEL, ("127.0.0.1", 1), log)  # type: ignore[arg-type]
    assert slept == [0.25] * 240
    monkeypatch.setattr(install, "listens", lambda *_: True)
    with pytest.raises(FailedPrecondition, match="did not listen"):
        wait_until_up(Told(), LABEL, address, log)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("taken", "free"), [([], 400), ([400, 399], 398), (range(201, 401), 200), ([401], 400)]
)
def test_an_account_that_is_to_be_made_gets_the_last_number_that_is_free(
    monkeypatch: pytest.MonkeyPatch, taken: Sequence[int], free: int
) -> None:
    monkeypatch.setattr(pwd, "getpwall", lambda: [SimpleNamespace(pw_uid=one) for one in taken])
    with pytest.raises(ConfigError) as raised:
        account_id("_nobody_has_this", Path("/"))
    assert raised.value.reason == "NO_SUCH_USER"
    assert raised.value.hint.endswith(f" -UID {free}")
    assert account_id("_nobody_has_this", Path("/prefix")) is None


@pytest.mark.parametrize(("we", "found"), [(0, 77), (1, None), (501, None)])
def test_only_root_gives_files_away(monkeypatch: pytest.MonkeyPatch, we: int, found: int | None) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda _: SimpleNamespace(pw_uid=77))
    monkeypatch.setattr(os, "geteuid", lambda: we)
    assert account_id("me", Path("/")) == found


def test_whose_state_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of who called sudo, or who calls; a coordinator has one where its operator's bundle is."""
    ours, theirs = state_root_of(tmp_path / "ours"), state_root_of(tmp_path / "theirs")

    def getpwnam(name: str) -> Any:
        return {"caller": SimpleNamespace(pw_dir=str(tmp_path / "theirs"), pw_uid=77)}[name]

    monkeypatch.setattr(pwd, "getpwnam", getpwnam)
    monkeypatch.setenv("HOME", str(tmp_path / "ours"))
    for caller, folder, owner in ((None, ours, os.getuid()), ("caller", theirs, 77)):
        if caller is None:
            monkeypatch.delenv("SUDO_USER", raising=False)
        else:
            monkeypatch.setenv("SUDO_USER", caller)
        assert users_state("node") is None
        for component, place in (("node", "node"), ("coordinator", "coordinator/operator")):
            (folder / place).mkdir(parents=True)
            (folder / place / "member.json").write_text("{}")
            assert users_state(component) == (folder / component, owner)
    (theirs / "coordinator" / "operator" / "member.json").rename(theirs / "coordinator" / "member.json")
    assert users_state("coordinator") is None
    monkeypatch.setenv("SUDO_USER", "nobody")
    assert users_state("node") is None


@pytest.mark.parametrize(
    ("component", "chosen", "address"),
    [
        ("node", {"listen": "0.0.0.0:7", "advertise": ["192.0.2.1:7"]}, ("127.0.0.1", 7)),
        ("node", {"listen": "[::]:7", "advertise": ["192.0.2.1:7"]}, ("::1", 7)),
        ("node", {"listen": "192.0.2.1:7"}, ("192.0.2.1", 7)),
        ("gateway", {"grpc_listen": "127.0.0.1:8"}, ("127.0.0.1", 8)),
        ("coordinator", {"listen": "192.0.2.1:9"}, ("192.0.2.1", 9)),
    ],
)
def test_where_a_service_is_to_listen(
    root: Path, component: str, chosen: dict[str, Any], address: tuple[str, int]
) -> None:
    control: Any = SimpleNamespace()
    service = Service(component, user="me")
    made = Installation(control, service, root, chosen={**chosen, "state_dir": "/elsewhere"})
    assert made._address() == address
    assert made.service.config == f"/var/db/sealring/config/{component}.toml"
    assert made._chosen == chosen
    nothing = Installation(control, service, root, chosen={"state_dir": "/elsewhere"})
    assert nothing.service.config is None
    named = replace(service, config="/etc/s.toml")
    assert Installation(control, named, root, chosen=chosen).service.config == "/etc/s.toml"
    assert Installation(control, named, root)._chosen == {}


def test_steps_that_fail_are_undone_from_the_last_on_and_each_for_itself() -> None:
    did: list[str] = []

    def step(name: str, *, works: bool = True, undone: bool = True) -> Step:
        def do() -> None:
            did.append(name)
            if not works:
                raise OSError("no")

        def undo() -> None:
            did.append(f"not {name}")
            if not undone:
                raise FailedPrecondition("it is held")

        return Step(name, do, undo)

    steps = [step("a"), step("b", undone=False), Step("c", lambda: None), step("d", works=False), step("e")]
    run_steps(steps, did.append, dry_run=True)
    assert did == ["would a", "would b", "would c", "would d", "would e"]
    did.clear()
    with pytest.raises(OSError, match="no"):
        run_steps(steps, did.append)
    assert did == [
        *("a", "done: a", "b", "done: b", "done: c", "d", "not d", "not b"),
        *("could not undo: b: it is held", "not a"),
    ]
    did.clear()
    run_steps(steps[:2], did.append)
    assert did == ["a", "done: a", "b", "done: b"]


def test_an_empty_folder_in_the_services_place_is_in_no_ones_way(root: Path, home: Path) -> None:
    control: Any = SimpleNamespace()
    own, there = join(home / "mine"), root / "var" / "db" / "sealring" / "node"
    there.mkdir(parents=True)
    made = Installation(control, Service("node", user="me"), root, adopt=own)
    made.check(start=False)
    (there / "file").touch()
    with pytest.raises(FailedPrecondition) as refused:
        made.check(start=False)
    assert refused.value.reason == "STATE_IN_THE_WAY"


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


def test_what_is_not_loaded_cannot_be_started(launchctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", launchctl.path)
    with pytest.raises(FailedPrecondition):
        Launchctl().kickstart("org.sealring.gateway")
