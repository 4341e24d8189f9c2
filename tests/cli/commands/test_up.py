"""`sealring up`, over a first machine that starts nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster
from commands import Machine, quickly

from sealring.cli.commands.up import serve_model
from sealring.coordinator.backup import STANDBY_MARK
from sealring.coordinator.store import Store
from sealring.mesh.errors import FailedPrecondition, Unavailable
from sealring.mesh.pki import Role
from sealring.mesh.system.paths import state_root_of
from sealring.v1 import admin_pb2, membership_pb2


@pytest.fixture
def up(here: Any, host: Any, coordinator: Any) -> Any:
    host.machine = Machine
    return lambda *options: here("up", *options)


def test_the_home_folder_is_found_where_no_shell_does(up: Any, home: Path) -> None:
    (home / "kept").mkdir()
    assert up("--models=~/kept", "--models", ".").status == 0
    assert Machine.made.settings["node"]["models"] == [str(home / "kept"), str(home)]
    assert "there is no folder" in up("--models", "none").err


def serving(name: str) -> Any:
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name=name, model=name))
    ring = admin_pb2.RingStatus(ring=f"{name}-0", phase=membership_pb2.RING_PHASE_SERVING)
    return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan, rings=[ring])])


def test_with_a_model_it_goes_on_until_that_is_served(host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The model does not fit on one machine, and a second one comes."""
    machine = Machine(Path("/state"), {}, say=print)
    none = admin_pb2.ListDeploymentsResponse()
    small = FailedPrecondition("demo needs 9 GiB more", reason="DOES_NOT_FIT")
    machine.admin.answers |= {
        "CreateDeployment": [small, admin_pb2.CreateDeploymentResponse()],
        "ListDeployments": [none, none, serving("demo")],
    }
    quickly(serve_model(machine, "demo"))  # type: ignore[arg-type]
    assert [one.spec.model for one in machine.admin.calls("CreateDeployment")] == ["demo", "demo"]
    said = capsys.readouterr().err
    assert "demo is not served yet: demo needs 9 GiB more; it is tried again when another" in said
    assert 'demo is serving. Ask it in another terminal: sealring chat "..."' in said
    assert "HTTP requests that name no temperature have the model's own, or 1" in said


def test_a_model_that_is_served_already_is_not_deployed_again(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(Path("/state"), {}, say=print)
    machine.admin.answers["ListDeployments"] = serving("demo")
    quickly(serve_model(machine, "demo"))  # type: ignore[arg-type]
    assert machine.admin.calls("CreateDeployment") == []
    assert "demo is serving" in capsys.readouterr().err


class Deposed(Machine):
    """Its coordinator ends at once."""

    async def start(self) -> None:
        raise Unavailable("it ended", reason="COMPONENT_ENDED", component="coordinator")


@pytest.fixture
def first(up: Any, host: Any, home: Path) -> Path:
    """The state folder of a first machine, without a coordinator."""
    host.machine = Deposed
    state = state_root_of(home)
    SigningCluster(home).save(state / "node", Role.MEMBER)
    (state / "gateway").mkdir()
    return state


ROSTER_OF_THE_STANDBY = b"signed by the standby"


def depose(coordinator: Path) -> None:
    SigningCluster(coordinator.parent).save(coordinator / "operator", Role.OPERATOR)
    store = Store.create(coordinator)
    store.set_meta("deposed", ROSTER_OF_THE_STANDBY)
    store.close()


def names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()} if folder.exists() else set()


JOINS = ["join", "--begun"]


def test_a_machine_that_has_joined_goes_on_as_a_member(up: Any, host: Any, first: Path) -> None:
    """As does a first machine that ended between the move of its coordinator and its start as a member."""
    before = names(first)
    for _ in range(2):
        assert "it goes on as a member" in up("--model", "demo").err
    assert (host.became, names(first)) == ([JOINS] * 2, before)


def test_a_standby_goes_on_following(up: Any, host: Any, first: Path) -> None:
    SigningCluster(first).save(first / "coordinator" / "operator", Role.OPERATOR)
    (first / "coordinator" / STANDBY_MARK).touch()
    assert "it goes on as a member" in up().err
    assert host.became == [JOINS]


def test_a_deposed_first_machine_goes_on_as_a_member_for_good(up: Any, host: Any, first: Path) -> None:
    depose(first / "coordinator")
    assert f"still in {first / 'deposed-1'}:" in up().err
    assert (first / "node" / "roster.dsse").read_bytes() == ROSTER_OF_THE_STANDBY
    assert "it goes on as a member" in up().err
    assert host.became == [JOINS] * 2
    assert {"gateway", "coordinator"} <= names(first / "deposed-1")
    (first / "gateway").mkdir()
    depose(first / "coordinator")
    assert f"still in {first / 'deposed-2'}:" in up().err, "deposed again, as a standby that was promoted"


@pytest.mark.parametrize("own", [False, True])
def test_join_there_goes_on_as_a_member_as_well(
    here: Any, host: Any, first: Path, home: Path, tmp_path: Path, own: bool
) -> None:
    coordinator = tmp_path / "disk" / "keys" if own else first / "coordinator"
    coordinator.parent.mkdir(exist_ok=True)
    depose(coordinator)
    (home / "s.toml").write_text(f'[coordinator]\nstate_dir = "{coordinator}"\n')
    assert f"{coordinator.parent / 'deposed-1'}" in here("--config", "s.toml", "join").err
    assert (coordinator.exists(), host.became[0][-2:]) == (False, JOINS)


@pytest.mark.parametrize("own", [False, True])
def test_what_could_not_be_moved_joins_what_was(
    here: Any, host: Any, first: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Also with a folder of the coordinator's own, which may be on another disk."""
    coordinator = tmp_path / "disk" / "keys" if own else first / "coordinator"
    coordinator.parent.mkdir(exist_ok=True)
    depose(coordinator)
    (home / "s.toml").write_text(f'[coordinator]\nstate_dir = "{coordinator}"\n')
    rename, fails = Path.rename, [True]

    def refuse(path: Path, target: Path) -> Path:
        if path == coordinator and fails and fails.pop():
            raise OSError(errno.EROFS, "Read-only file system")
        assert path.parent in (target.parent.parent, first / "config"), "a move to another disk fails"
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    (first / "deposed-2").mkdir()
    done = here("--config", "s.toml", "up")
    assert "[STATE_UNWRITABLE]" in done.err
    assert (str(coordinator) in done.err, host.became) == (True, [])
    assert "gateway" in names(first / "deposed-2")
    done = here("--config", "s.toml", "up")
    aside = coordinator.parent / ("deposed-1" if own else "deposed-2")
    assert str(aside) in done.err
    assert str(first / "deposed-2") in done.err
    assert coordinator.name in names(aside)
    assert names(first) >= {"deposed-2", "node"}
    assert "deposed-3" not in names(first)
    assert host.became[0][-2:] == JOINS
