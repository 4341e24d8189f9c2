"""`sealring service`: what is made, what launchd is asked for, and what is undone."""

from __future__ import annotations

import os
import plistlib
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import Launchd

from sealring.cli.proxy import digest_of
from sealring.cli.service.install import Installation, InstallStep, account_id, run_steps
from sealring.cli.service.launchd import Service
from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.paths import proxy_key_file

LABEL = "org.sealring.node"
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def launchd(host: Any) -> Launchd:
    host.services = Launchd()
    return host.services  # type: ignore[no-any-return]


@pytest.fixture
def state(root: Path) -> Path:
    """The state of a node that has joined where the service looks, with its settings beside it."""
    folder = root / "var" / "db" / "sealring" / "node"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "member.json").write_text("{}")
    (folder.parent / "config").mkdir()
    settings = f'[node]\nstate_dir = "{folder}"\nlisten = "127.0.0.1:7710"\nring_host = "127.0.0.1"\n'
    (folder.parent / "config" / "node.toml").write_text(settings)
    return folder


@pytest.fixture
def plist(root: Path) -> Path:
    return root / "Library" / "LaunchDaemons" / f"{LABEL}.plist"


@pytest.fixture
def service(here: Any, launchd: Launchd, root: Path) -> Any:
    def run(verb: str, *arguments: str) -> Any:
        rooted = [] if verb == "status" else ["--prefix", str(root)]
        return here("service", verb, *arguments, *rooted)

    return run


def test_off_macos_it_says_so(here: Any, tmp_path: Path) -> None:
    done = here("service", "status", PATH=str(tmp_path))
    assert (done.status, "only macOS has" in done.err, "NOT_MACOS" in done.err) == (7, True, True)


def test_a_life_from_install_to_uninstall(
    service: Any, launchd: Launchd, root: Path, state: Path, plist: Path
) -> None:
    settings = root / "sealring.toml"
    settings.write_text('[node]\nlisten = "127.0.0.1:1"\n')
    done = service("install", "node", "--user", "me", "--config", str(settings))
    assert done.status == 0, done.err
    content = plistlib.loads(plist.read_bytes())
    assert content["UserName"] == "me"
    assert content["ProgramArguments"][1:5] == ["--config", str(settings), "node", "run"]
    assert plist.stat().st_mode & 0o777 == 0o644
    rules = root / "etc" / "newsyslog.d" / f"{LABEL}.conf"
    assert "/var/log/sealring/node.log\tme:wheel" in rules.read_text()
    assert (launchd.did, launchd.loaded) == (["bootstrap"], {LABEL: plist})

    shown = {"label": LABEL, "loaded": True, "state": "running", "pid": 4711, "last_exit": "(never exited)"}
    assert service("status", "node", "--json").data == [shown]
    rows = [line.split()[:3] for line in service("status").out.splitlines()]
    assert rows == [
        ["service", "state", "pid"],
        ["org.sealring.coordinator", "not", "loaded"],
        [LABEL, "running", "4711"],
        ["org.sealring.gateway", "not", "loaded"],
        ["org.sealring.proxy", "not", "loaded"],
    ]
    for verb, asked, said in (
        ("restart", ["bootout", "bootstrap", "kickstart"], "restarted"),
        ("stop", ["bootout"], "stopped"),
        ("stop", [], "stopped"),
        ("start", ["bootstrap", "kickstart"], "started"),
        ("uninstall", ["bootout"], "removed"),
        ("uninstall", [], "removed"),
    ):
        launchd.did.clear()
        done = service(verb, "node")
        assert (done.status, done.err, launchd.did) == (0, f"{said} {LABEL}\n", asked)
    assert not plist.exists()
    assert not rules.exists()
    for verb in ("start", "restart"):
        missing = service(verb, "node")
        assert (missing.status, "sealring service install node" in missing.err) == (3, True)
    assert launchd.did == []


def test_the_proxy_is_a_service_with_the_digest_of_a_key_that_is_the_callers(
    service: Any, launchd: Launchd, root: Path, state: Path, home: Path
) -> None:
    """It has no key of the node and none of its own. Whoever removes the node's service removes it too."""
    assert service("install", "proxy", "--dry-run").status == 0
    assert not proxy_key_file().exists()
    assert service("install", "node", "--user", "me").status == 0
    done = service("install", "proxy", "--user", "me")
    assert (done.status, "programs ask at http://127.0.0.1:8080/v1" in done.err) == (0, True), done.err
    plist = root / "Library" / "LaunchDaemons" / "org.sealring.proxy.plist"
    content = plistlib.loads(plist.read_bytes())
    assert content["UserName"] == "me"
    key = proxy_key_file().read_text().strip()
    assert content["ProgramArguments"][1:] == [
        *("proxy", "--listen", "127.0.0.1:8080", "--key-sha256", digest_of(key)),
        *("--log-file", "/var/log/sealring/proxy.log", "--member", "/var/db/sealring/node/client"),
    ]
    assert list((root / "var" / "db" / "sealring" / "proxy").iterdir()) == []
    proxy = "org.sealring.proxy"
    for verb, asked, said in (
        ("stop", ["bootout"] * 2, f"stopped {proxy}\nstopped {LABEL}\n"),
        ("start", ["bootstrap", "kickstart"] * 2, f"started {LABEL}\nstarted {proxy}\n"),
        ("restart", ["bootout", "bootstrap", "kickstart"] * 2, f"restarted {LABEL}\nrestarted {proxy}\n"),
    ):
        launchd.did.clear()
        assert (service(verb, "node").err, launchd.did) == (said, asked)
    launchd.did.clear()
    assert (service("restart", "proxy").err, len(launchd.did)) == (f"restarted {proxy}\n", 3)
    assert key.encode() not in plist.read_bytes()
    done = service("uninstall", "node")
    assert done.err == "removed org.sealring.proxy\nremoved org.sealring.node\n"
    assert (launchd.loaded, plist.exists(), proxy_key_file().exists()) == ({}, False, False)


def test_an_install_touches_no_other_components_files(service: Any, root: Path) -> None:
    assert service("install", "node", "--user", "one", "--no-start").status == 0
    assert service("install", "gateway", "--user", "two", "--no-start").status == 0
    folder = root / "etc" / "newsyslog.d"
    assert "node.log\tone:wheel" in (folder / "org.sealring.node.conf").read_text()
    rules = (folder / "org.sealring.gateway.conf").read_text()
    assert "gateway.log\ttwo:wheel" in rules
    assert "node.log" not in rules


def test_a_link_in_the_place_of_a_log_is_refused(
    service: Any, launchd: Launchd, root: Path, state: Path
) -> None:
    log = root / "var" / "log" / "sealring" / "node.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/etc/passwd")
    done = service("install", "node")
    assert (done.status, "UNSAFE_PLACE" in done.err, launchd.did) == (7, True, [])
    assert not (root / "Library").exists()


@pytest.mark.parametrize("component", ["coordinator", "node", "gateway", "proxy"])
def test_a_component_without_state_is_not_installed_and_its_beginning_is_named(
    service: Any, launchd: Launchd, root: Path, component: str
) -> None:
    begins = {
        "coordinator": "restore from",
        "node": "sudo sealring join --service",
        "gateway": "gateway join",
        "proxy": "sudo sealring join --service",
    }
    done = service("install", component)
    assert (done.status, "[NOT_ENROLLED]" in done.err, begins[component] in done.err) == (7, True, True)
    assert (launchd.did, list(root.iterdir())) == ([], [])


def test_an_installed_service_keeps_the_settings_that_it_was_joined_with(
    service: Any, root: Path, state: Path, plist: Path
) -> None:
    said = service("install", "node", "--dry-run")
    assert f"would write {plist}" in said.err
    assert f"would start {LABEL} and wait until it listens" in said.err
    assert not plist.exists()
    assert service("install", "node").status == 0
    arguments = plistlib.loads(plist.read_bytes())["ProgramArguments"]
    assert arguments[1:3] == ["--config", "/var/db/sealring/config/node.toml"]
    kept = (state.parent / "config" / "node.toml").read_text()
    assert kept == '[node]\nlisten = "127.0.0.1:7710"\nring_host = "127.0.0.1"\n'


@pytest.mark.parametrize("why", ["exit", "silence", "launchctl", signal.SIGTERM, signal.SIGHUP])
def test_what_does_not_come_up_is_put_back(
    service: Any, host: Any, launchd: Launchd, root: Path, state: Path, plist: Path, why: Any
) -> None:
    plist.parent.mkdir(parents=True)
    plist.write_bytes(b"the one that was there before")
    launchd.loaded[LABEL] = plist
    log = root / "var" / "log" / "sealring" / "node.log"
    log.parent.mkdir(parents=True)
    log.write_text("CANNOT_LISTEN\n")
    (state.parent / "config" / "node.toml").write_text('[node]\nlisten = "192.0.2.1:7"\n')
    if why == "exit":
        launchd.last_exit = "7: EX"
    elif why == "launchctl":
        launchd.fails["kickstart"] = launchd.fails["bootstrap"] = FailedPrecondition("no", reason="LAUNCHCTL")
    elif why != "silence":
        host.pauses = iter([lambda: signal.raise_signal(why)])
    done = service("install", "node")
    if why == "exit":
        assert "it ended with status 7: EX; the end of" in done.err
        assert "CANNOT_LISTEN" in done.err
    elif why == "silence":
        assert "did not listen at 192.0.2.1:7 within 300 s" in done.err
        assert host.passed == pytest.approx(300, abs=1)
        assert done.err.count("macOS checks each library of a new installation") == 1
    assert done.status == (7 if isinstance(why, str) else 128 + why)
    assert plist.read_bytes() == b"the one that was there before"
    assert not list((root / "etc" / "newsyslog.d").iterdir())
    assert launchd.did[-1] == "bootstrap"
    assert (LABEL in launchd.loaded) == (why != "launchctl"), "and it runs again"


def test_a_service_that_only_listens_has_not_come_up(
    service: Any, host: Any, launchd: Launchd, state: Path
) -> None:
    """Somebody else may listen there meanwhile."""
    launchd.last_exit = ""
    host.pauses = iter([lambda: host.ports.add(7710)])
    assert "SERVICE_DID_NOT_START" in service("install", "node").err


def test_an_address_in_use_is_named_before_anything_is_done(
    service: Any, host: Any, launchd: Launchd, state: Path
) -> None:
    host.ports.add(7710)
    assert "ADDRESS_IN_USE" in service("install", "node").err
    assert launchd.did == []


@pytest.mark.parametrize(
    ("listen", "address"),
    [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("192.0.2.1:7", "192.0.2.1:7")],
)
def test_a_service_is_looked_for_where_this_machine_reaches_it(
    service: Any, host: Any, root: Path, state: Path, listen: str, address: str
) -> None:
    asked: list[tuple[str, int]] = []
    host.listens = lambda *where: bool(asked.append(where)) or len(asked) > 1
    advertise = 'advertise = ["192.0.2.1:7"]'
    (state.parent / "config" / "node.toml").write_text(f'[node]\nlisten = "{listen}"\n{advertise}\n')
    assert service("install", "node").status == 0
    assert asked == [parse_address(address)] * 2


@pytest.mark.skipif(not IS_ROOT, reason="only root tries as another account")
def test_a_model_folder_that_the_account_may_not_enter_is_named_before_anything_is_done(
    host: Any, launchd: Launchd, root: Path, tmp_path: Path
) -> None:
    """As a user's home folder; tried as the account, for root may enter everything."""
    closed = tmp_path / "home" / "models"
    closed.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)

    def check(*folders: Path) -> None:
        chosen = {"models": [str(folder) for folder in folders]}
        Installation(host, Service("node", user="nobody"), root, chosen=chosen).check(start=False)

    check(Path("/"), tmp_path / "missing")
    with pytest.raises(FailedPrecondition) as raised:
        check(Path("/"), closed)
    assert raised.value.reason == "MODEL_FOLDER_UNREADABLE"
    assert (str(closed) in raised.value.message, "home folders" in raised.value.hint) == (True, True)


@pytest.mark.parametrize("helper", ["changeable", "none", "/bin/sh"])
def test_a_helper_that_others_can_change_is_not_run_by_the_service(
    service: Any, state: Path, tmp_path: Path, helper: str
) -> None:
    (tmp_path / "changeable").touch()
    (tmp_path / "changeable").chmod(0o777)
    settings = f'[node]\nlisten = "127.0.0.1:1"\nenclave_helper = "{tmp_path / helper}"\n'
    (state.parent / "config" / "node.toml").write_text(settings)
    done = service("install", "node")
    assert ("UNSAFE_PLACE" in done.err) == (helper != "/bin/sh")


def test_a_missing_account_comes_with_the_command_that_makes_it(here: Any, launchd: Launchd) -> None:
    done = here("service", "install", "node", "--user", "_nobody_has_this")
    assert done.status == 7
    assert "sudo sysadminctl -addUser _nobody_has_this -roleAccount -UID 400" in done.err


def test_only_root_gives_files_away() -> None:
    assert account_id("root", Path("/")) == (0 if IS_ROOT else None)
    assert account_id("_nobody_has_this", Path("/prefix")) is None
    with pytest.raises(ConfigError):
        account_id("_nobody_has_this", Path("/"))


def test_steps_that_fail_are_undone_from_the_last_on_and_each_for_itself() -> None:
    did: list[str] = []

    def step(name: str, *, works: bool = True, undone: bool = True) -> InstallStep:
        def do() -> None:
            did.append(name)
            if not works:
                raise OSError("no")

        def undo() -> None:
            did.append(f"not {name}")
            if not undone:
                raise FailedPrecondition("it is held")

        return InstallStep(name, do, undo)

    steps = [
        step("a"),
        step("b", undone=False),
        InstallStep("c", lambda: None),
        step("d", works=False),
        step("e"),
    ]
    run_steps(steps, did.append, dry_run=True)
    assert did == ["would a", "would b", "would c", "would d", "would e"]
    did.clear()
    with pytest.raises(OSError, match="no"):
        run_steps(steps, did.append)
    assert did == [
        *("a", "done: a", "b", "done: b", "done: c", "d", "not d", "not b"),
        *("could not undo: b: it is held", "not a"),
    ]
