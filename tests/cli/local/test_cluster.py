"""The components of a cluster on one machine. Its life is shown by tests/integration and by test_admin.py."""

from __future__ import annotations

import asyncio
import json
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from bundles import SigningCluster
from commands import Coordinator, FakeHost
from patience import until

from sealring.cli.here.settings_files import PORTS
from sealring.cli.local.cluster import LocalCluster, is_member, make_whole, redirect
from sealring.cli.terminal.host import SLOW_START
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import AlreadyExists, ConfigError, InvalidInput, Unavailable
from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import Role
from sealring.mesh.system.paths import is_enrolled
from sealring.v1 import admin_pb2, membership_pb2


class Crash(BaseException):
    pass


def crash_after_the_keys(settings: CoordinatorSettings) -> None:
    settings.state_dir.mkdir(parents=True)
    (settings.state_dir / "root.key").write_text("a key")
    raise Crash


def test_a_coordinator_that_a_crash_left_half_made_is_made_anew(tmp_path: Path) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path / "coordinator")
    with pytest.raises(Crash):
        make_whole(settings, crash_after_the_keys)
    assert not settings.state_dir.exists()
    settings.state_dir.mkdir()
    make_whole(settings, init)
    assert is_enrolled(settings.state_dir / "operator")
    assert [one.name for one in tmp_path.iterdir()] == ["coordinator"]
    with pytest.raises(AlreadyExists):
        make_whole(settings, init)


def test_a_coordinator_whose_keys_are_elsewhere_is_made_in_its_place(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(settings: CoordinatorSettings) -> None:
        settings.state_dir.mkdir(parents=True)
        made.append(settings.state_dir)

    for name, keys in (("one", ()), ("two", (tmp_path / "second.key",))):
        settings = CoordinatorSettings(state_dir=tmp_path / name)
        make_whole(settings.model_copy(update={"roster_key_files": keys}), make)
        assert settings.state_dir.is_dir()
    assert made == [tmp_path / ".one.new", tmp_path / "two"]


@pytest.mark.parametrize(("nodes", "fine"), [(-1, False), (0, False), (1, True), (64, True), (65, False)])
def test_a_cluster_has_so_many_nodes(tmp_path: Path, nodes: int, fine: bool) -> None:
    with nullcontext() if fine else pytest.raises(InvalidInput, match=f"{nodes} nodes are not possible"):
        made = LocalCluster(tmp_path, "model", nodes=nodes)
        assert made.names == ["coordinator", "gateway", *(f"node-{number}" for number in range(nodes))]


def test_ports_are_kept_because_members_remember_them(tmp_path: Path) -> None:
    small, large = (LocalCluster(tmp_path, "model", nodes=nodes) for nodes in (1, 3))
    small.write_configs()
    large.write_configs()
    names = ["coordinator", "join", "gateway", "gateway-http", "node-0", "node-1", "node-2"]
    ports = json.loads((tmp_path / PORTS).read_text())
    assert list(ports) == names
    assert [large.address(name) for name in names] == [f"127.0.0.1:{ports[name]}" for name in names]
    assert len(set(ports.values())) == len(names)
    assert [small.address(name) for name in names[:5]] == [large.address(name) for name in names[:5]]
    assert (large.grpc_address, large.http_url) == (
        large.address("gateway"),
        f"http://{large.address('gateway-http')}",
    )
    for content in ("[", "7", '{"gateway": "x"}', '{"gateway": null}'):
        (tmp_path / PORTS).write_text(content)
        with pytest.raises(ConfigError) as raised:
            large.write_configs()
        assert raised.value.reason == "BAD_CLUSTER_FILE"


def test_each_component_finds_what_it_is_set_to(tmp_path: Path) -> None:
    extra = {"node": {"listen": "127.0.0.1:1"}, "gateway": {"queue_limit": 5}}
    made = LocalCluster(tmp_path, "m", nodes=2, settings=extra)
    made.write_configs()
    made.write_configs()
    folder = tmp_path / "config"
    assert folder.stat().st_mode & 0o777 == 0o700
    found = {file.stem: tomllib.loads(file.read_text()) for file in folder.iterdir()}
    node = {
        "name": "node-1",
        "listen": "127.0.0.1:1",
        "software_identity_allowed": True,
        "memory_limit": int(psutil.virtual_memory().total * 0.75) // 2,
    }
    assert found["node-1"] == {"node": {"state_dir": str(tmp_path / "node-1"), **node}}
    assert found["gateway"] == {
        "gateway": {
            "state_dir": str(tmp_path / "gateway"),
            "name": "gateway",
            "grpc_listen": made.grpc_address,
            "http_listen": made.address("gateway-http"),
            "queue_limit": 5,
        }
    }
    assert found["coordinator"] == {
        "coordinator": {
            "state_dir": str(tmp_path / "coordinator"),
            "listen": made.address("coordinator"),
            "join_listen": made.address("join"),
            "software_identity_allowed": True,
        }
    }


SHOWS_ITS_GPU = ("/bin/sh", "-c", "echo gpu $CUDA_VISIBLE_DEVICES; exec sleep 60")


@pytest.mark.parametrize(("gpus", "expected"), [(2, "010"), (1, "000"), (0, [""] * 3)])
async def test_nodes_share_gpus_by_turns_and_see_all_unless_they_share_them(
    tmp_path: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host.components = SHOWS_ITS_GPU
    async with LocalCluster(tmp_path / "state", "model", gpus=gpus, host=host) as cluster:
        for folder in ("", "logs", "tmp"):
            assert (tmp_path / "state" / folder).stat().st_mode & 0o777 == 0o700
        for name in cluster.node_names:
            await cluster.start_one(name)
        for number, name in enumerate(cluster.node_names):
            while not (shown := cluster.logs[name].read_text()):
                await asyncio.sleep(0.01)
            assert shown.split()[1:] == list(expected[number])


@pytest.mark.parametrize(
    ("joined", "members", "there"),
    [(True, ["operator"], True), (True, ["another"], False), (False, ["operator"], False)],
)
def test_a_component_is_a_member_if_it_is_enrolled_and_listed(
    tmp_path: Path, joined: bool, members: list[str], there: bool
) -> None:
    if joined:
        SigningCluster(tmp_path).save(tmp_path / "node", Role.MEMBER)
    assert is_member(tmp_path / "node", members) == there


def test_a_component_is_given_the_new_address_of_its_coordinator_and_stays_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    SigningCluster(tmp_path).save(folder, Role.MEMBER)
    before = load_machine_state(folder)
    redirect(folder, "10.0.0.7:7700")
    assert load_machine_state(folder) == replace(before, coordinator="10.0.0.7:7700")


async def test_who_cannot_wait_for_the_end_kills_and_still_leaves_nobody(
    tmp_path: Path, host: FakeHost
) -> None:
    host.components = ("/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done")
    cluster = LocalCluster(tmp_path / "state", "model", nodes=1, host=host)

    async def lead() -> None:
        async with cluster:
            await cluster.start_one("node-0")
            await until(lambda: cluster.logs["node-0"].read_text())

    leading = asyncio.ensure_future(lead())
    log = cluster.state_dir / "logs" / "node-0.log"
    await until(lambda: log.exists() and log.read_text())
    await asyncio.sleep(0.1)  # it is being ended, in vain
    leading.cancel()
    await leading
    assert not psutil.pid_exists(cluster.processes["node-0"])


@pytest.mark.parametrize("there", [False, True])
async def test_a_model_is_deployed_once(tmp_path: Path, here: object, host: FakeHost, there: bool) -> None:
    said: list[str] = []

    def listed(*names: str) -> admin_pb2.ListDeploymentsResponse:
        ring = admin_pb2.RingStatus(ring="x", phase=membership_pb2.RING_PHASE_SERVING)
        plans = [admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name=name)) for name in names]
        return admin_pb2.ListDeploymentsResponse(
            deployments=[admin_pb2.Deployment(plan=plan, rings=[ring]) for plan in plans]
        )

    class Offered(LocalCluster):
        async def wait_for_gateway(self, name: str = "") -> None:
            said.append("offered")

    host.components = ("/bin/sh", "-c", "exec sleep 60")
    lists = [listed("other", *(["mine"] * there)), listed("other", "mine")]
    async with Offered(tmp_path, "/models/m", nodes=1, name="mine", say=said.append, host=host) as cluster:
        admin = Coordinator(ListDeployments=lists)
        cluster.admin = admin  # type: ignore[assignment]
        assert (await cluster.deploy(stages=1)).plan.spec.name == "mine"
    asked = [(one.spec.name, one.spec.model, one.spec.stages) for one in admin.calls("CreateDeployment")]
    assert asked == ([] if there else [("mine", "/models/m", 1)])
    assert said == [*([] if there else ["planning mine over one node"]), "waiting for the gateway", "offered"]


@pytest.mark.parametrize(("platform", "said"), [("darwin", 1), ("linux", 0)])
async def test_a_mac_says_what_a_first_start_may_take_minutes_for(
    tmp_path: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch, platform: str, said: int
) -> None:
    """A wait is over when its component ends, so it can be long."""
    monkeypatch.setattr("sealring.cli.local.cluster.SLOW_SECONDS", 0.0)
    host.platform = platform
    host.components = ("/bin/sh", "-c", "exec sleep 60")
    heard: list[str] = []
    begun = asyncio.Event()

    async def wait() -> None:
        await asyncio.sleep(0.01)  # for what comes after no time
        begun.set()

    async with LocalCluster(tmp_path, "m", nodes=1, say=heard.append, host=host) as cluster:
        await cluster.begun(wait())
        assert begun.is_set()
        assert heard == [SLOW_START] * said
        host.components = cluster.children.command = ("/bin/sh", "-c", "exit 3")
        await cluster.children.start("node-0", [])
        with pytest.raises(Unavailable) as ended:
            await cluster.begun(asyncio.sleep(200))
    assert ended.value.reason == "COMPONENT_ENDED"
