"""The components of a cluster on one machine."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from sealring.cli.local import cluster as module
from sealring.cli.local.cluster import Cluster, LocalCluster, _make_whole
from sealring.cli.local.leftovers import PORTS
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import AlreadyExists, ConfigError, DeadlineExceeded, InvalidInput, Unavailable
from sealring.mesh.member.state import is_enrolled
from sealring.v1 import admin_pb2, inference_pb2


class Crash(BaseException):
    pass


def crash_after_the_keys(settings: CoordinatorSettings) -> None:
    settings.state_dir.mkdir(parents=True)
    (settings.state_dir / "root.key").write_text("a key")
    raise Crash


def test_a_coordinator_that_a_crash_left_half_made_is_made_anew(tmp_path: Path) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path / "coordinator")
    with pytest.raises(Crash):
        _make_whole(settings, crash_after_the_keys)
    assert not settings.state_dir.exists()
    settings.state_dir.mkdir()
    _make_whole(settings, init)
    assert is_enrolled(settings.state_dir / "operator")
    assert [one.name for one in tmp_path.iterdir()] == ["coordinator"]
    with pytest.raises(AlreadyExists):
        _make_whole(settings, init)


def test_a_coordinator_whose_keys_are_elsewhere_is_made_in_its_place(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(settings: CoordinatorSettings) -> None:
        settings.state_dir.mkdir(parents=True)
        made.append(settings.state_dir)

    for name, keys in (("one", ()), ("two", (tmp_path / "second.key",))):
        settings = CoordinatorSettings(state_dir=tmp_path / name)
        _make_whole(settings.model_copy(update={"roster_key_files": keys}), make)
        assert settings.state_dir.is_dir()
    assert made == [tmp_path / ".one.new", tmp_path / "two"]


async def test_who_waits_for_a_start_is_told_each_part_of_it(tmp_path: Path) -> None:
    said: list[str] = []

    class Quick(Cluster):
        names = ("coordinator", "node-0", "gateway", "node-1")

        def write_configs(self) -> None: ...

        def _count_nodes(self) -> str:
            return "2 nodes"

        async def start_coordinator(self) -> None:
            said.append("(coordinator)")

        async def enrol_all(self) -> None:
            said.append("(enrolled)")

        async def _or_failure(self, work: Any) -> Any:
            return await work

        async def start_one(self, name: str) -> None:
            said.append(f"({name})")

        async def wait_for_nodes(self) -> None:
            said.append("(online)")

    await Quick(tmp_path / "state", say=said.append).start()
    assert said == [
        "starting the coordinator",
        "(coordinator)",
        "enrolling 2 nodes and a gateway",
        "(enrolled)",
        "starting the nodes and the gateway",
        "(node-0)",
        "(node-1)",
        "(gateway)",
        "(online)",
    ]


class Clock:
    """`time` of the module; each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0)
    return made


@pytest.mark.parametrize(("nodes", "fine"), [(-1, False), (0, False), (1, True), (64, True), (65, False)])
def test_a_cluster_has_so_many_nodes(tmp_path: Path, nodes: int, fine: bool) -> None:
    with nullcontext() if fine else pytest.raises(InvalidInput, match=f"{nodes} nodes are not possible"):
        made = LocalCluster(tmp_path, "model", nodes=nodes)
        assert made.names == ["coordinator", "gateway", *(f"node-{number}" for number in range(nodes))]
        assert made._count_nodes() == ("one node" if nodes == 1 else f"{nodes} nodes")


def test_ports_are_kept_because_members_remember_them(tmp_path: Path) -> None:
    small, large = (LocalCluster(tmp_path, "model", nodes=nodes) for nodes in (1, 3))
    small.choose_ports()
    large.choose_ports()
    names = ["coordinator", "join", "gateway", "gateway-http", "node-0", "node-1", "node-2"]
    assert list(large.ports) == names
    assert len(set(large.ports.values())) == len(names)
    assert {name: large.ports[name] for name in small.ports} == small.ports
    assert json.loads((tmp_path / PORTS).read_text()) == large.ports
    assert (large.grpc_address, large.http_url) == (
        f"127.0.0.1:{large.ports['gateway']}",
        f"http://127.0.0.1:{large.ports['gateway-http']}",
    )
    assert large.operator_bundle == tmp_path / "coordinator" / "operator"
    for content in ("[", "7", '{"gateway": "x"}', '{"gateway": null}'):
        (tmp_path / PORTS).write_text(content)
        with pytest.raises(ConfigError) as raised:
            large.choose_ports()
        assert raised.value.reason == "BAD_CLUSTER_FILE"


def test_each_component_is_set_to_what_it_shares_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [SimpleNamespace(total=1 << 30)]
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory[0])
    extra = {"node": {"listen": "127.0.0.1:1"}, "gateway": {"queue_limit": 5}}
    plain, made = (LocalCluster(tmp_path, "m", nodes=2, settings=one) for one in (None, extra))
    made.choose_ports()
    plain.choose_ports()
    assert plain.settings_of("coordinator") == {
        "state_dir": str(tmp_path / "coordinator"),
        "listen": plain.address("coordinator"),
        "join_listen": plain.address("join"),
        "software_identity_allowed": True,
    }
    node = {
        "state_dir": str(tmp_path / "node-1"),
        "name": "node-1",
        "listen": plain.address("node-1"),
        "software_identity_allowed": True,
        "memory_limit": int((1 << 30) * 0.75) // 2,
    }
    assert plain.settings_of("node-1") == node
    assert made.settings_of("node-1") == node | {"listen": "127.0.0.1:1"}
    assert made.settings_of("gateway") == plain.settings_of("gateway") | {"queue_limit": 5}
    assert set(plain.settings_of("gateway")) == {"state_dir", "name", "grpc_listen", "http_listen"}
    memory[0].total = 1 << 20
    assert plain.settings_of("node-0")["memory_limit"] == 64 << 20, "an engine needs as much at least"


def test_a_process_sees_every_gpu_unless_nodes_share_them(tmp_path: Path) -> None:
    assert LocalCluster(tmp_path, "m")._environment("node-0") == {}
    shared = LocalCluster(tmp_path, "m", gpus=1)
    assert shared._environment("node-2") == {"CUDA_VISIBLE_DEVICES": "0"}
    assert shared._environment("gateway") == {}


def test_each_component_finds_what_it_is_set_to(tmp_path: Path) -> None:
    made = LocalCluster(tmp_path, "m", nodes=1)
    made.write_configs()
    made.write_configs()
    folder = tmp_path / "config"
    assert folder.stat().st_mode & 0o777 == 0o700
    found = {file.stem: tomllib.loads(file.read_text()) for file in folder.iterdir()}
    assert found == {
        "coordinator": {"coordinator": made.settings_of("coordinator")},
        "gateway": {"gateway": made.settings_of("gateway")},
        "node-0": {"node": made.settings_of("node-0")},
    }


@pytest.mark.parametrize(
    ("joined", "peer", "coordinator", "there"),
    [
        (True, "good", "a:1", True),
        (True, "evicted", "a:1", False),
        (True, "good", "b:1", False),
        (False, "good", "a:1", False),
    ],
)
async def test_who_is_no_member_or_looks_elsewhere_is_enrolled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool, peer: str, coordinator: str, there: bool
) -> None:
    made: Any = LocalCluster(tmp_path, "m", nodes=2)
    made.choose_ports()
    state = SimpleNamespace(peer=SimpleNamespace(id=peer), coordinator=coordinator)
    roster = SimpleNamespace(members=[SimpleNamespace(id="good")], gateways=[SimpleNamespace(id="edge")])
    gateway = SimpleNamespace(peer=SimpleNamespace(id="edge"), coordinator="a:1")
    bundle = SimpleNamespace(coordinator="a:1", root_sha256=b"pin")
    for name, stand_in in (
        ("sealring.mesh.member.state.is_enrolled", lambda folder: joined or folder.name == "gateway"),
        (
            "sealring.mesh.member.state.load_machine_state",
            lambda folder: gateway if folder.name == "gateway" else state,
        ),
        ("sealring.mesh.pki.root.decode_chain", lambda chain: chain),
        ("sealring.mesh.pki.root.verify_root_chain", lambda chain, pin, *, now: (chain, pin)),
        ("sealring.mesh.roster.reader.check_roster", lambda told, root, *, now: roster),
        ("sealring.cli.local.cluster.read_bundle", lambda folder: bundle),
    ):
        monkeypatch.setattr(name, stand_in)
    enrolled: list[str] = []

    async def call(method: str, **fields: Any) -> Any:
        if method == "CreateJoinToken":
            enrolled.append(fields["role"])
            return SimpleNamespace(token="sr2.x")
        return SimpleNamespace(root_metadata=b"chain", roster=b"roster")

    async def join(settings: Any, token: str) -> None:
        enrolled.append(settings.name)

    monkeypatch.setattr("sealring.node.join.join", join)
    monkeypatch.setattr("sealring.gateway.join.join", join)
    made.admin = SimpleNamespace(call=call)
    await made.enrol_all()
    assert sorted(enrolled) == ([] if there else ["ROLE_NODE", "ROLE_NODE", "node-0", "node-1"])
    roster.gateways.clear()
    enrolled.clear()
    await made.enrol_all()
    assert {"ROLE_GATEWAY", "gateway"} <= set(enrolled)


@pytest.mark.parametrize("enrolled", [False, True])
async def test_a_coordinator_is_made_once_and_then_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enrolled: bool
) -> None:
    did: list[Any] = []
    made: Any = LocalCluster(tmp_path, "m", nodes=1)
    made.choose_ports()

    async def start(name: str, command: list[str], environment: dict[str, str]) -> None:
        did.append((name, *command[-2:], environment))

    async def wait(address: str) -> None:
        did.append(("bundle", address))

    async def call(method: str, **how: Any) -> None:
        did.append((method, how))

    @asynccontextmanager
    async def connected(bundle: Path, *, seconds: float) -> AsyncIterator[Any]:
        did.append((bundle, seconds))
        yield SimpleNamespace(call=call)

    made.children = Parts()
    made.children.start = start
    made._wait_for_bundle = wait
    monkeypatch.setattr("sealring.mesh.member.state.is_enrolled", lambda folder: enrolled)
    monkeypatch.setattr(module, "_make_whole", lambda settings, init: did.append("made"))
    monkeypatch.setattr(module, "connect", connected)
    await made.start_coordinator()
    assert did == [
        *([] if enrolled else ["made"]),
        ("coordinator", "coordinator", "run", {}),
        ("bundle", made.address("coordinator")),
        (tmp_path / "coordinator" / "operator", 60.0),
        ("ListJoinTokens", {"wait_for_ready": True}),
    ]
    await made._stack.aclose()


async def test_the_bundle_is_waited_for_until_it_leads_to_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    expired = ConfigError("x", reason="OPERATOR_CERTIFICATE_EXPIRED")
    made = LocalCluster(tmp_path, "m")
    made.choose_ports()
    answers: list[Any] = []

    def read_bundle(folder: Path) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(coordinator=answer)

    monkeypatch.setattr(module, "read_bundle", read_bundle)
    for answers[:], looks in ((["a:1"], 0), (["b:1", expired, "a:1"], 2), (["b:1"], 61)):
        clock.now = 0.0
        await made._wait_for_bundle("a:1")
        assert clock.now == pytest.approx(looks + 1, abs=1)
    for answers[:], seconds in (([expired], 61), ([ConfigError("x", reason="NO_OPERATOR_BUNDLE")], 1)):
        clock.now = 0.0
        with pytest.raises(ConfigError) as raised:
            await made._wait_for_bundle("a:1")
        assert raised.value is answers[0]
        assert clock.now == pytest.approx(seconds, abs=1)


async def test_nodes_are_waited_for_until_all_are_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    said: list[str] = []
    made: Any = LocalCluster(tmp_path, "m", nodes=2, say=said.append)
    made.choose_ports()
    monkeypatch.setattr(
        "sealring.mesh.member.state.load_machine_state",
        lambda folder: SimpleNamespace(peer=SimpleNamespace(id=f"id of {folder.name}")),
    )
    looks = [[], ["id of node-1", "id of a stranger"], ["id of node-1", "id of node-0"]]

    async def call(method: str) -> Any:
        assert method == "ListNodes"
        online = looks.pop(0) if len(looks) > 1 else looks[0]
        gone = admin_pb2.Node(id="id of node-0", state=admin_pb2.NODE_STATE_OFFLINE)
        there = [admin_pb2.Node(id=one, state=admin_pb2.NODE_STATE_ONLINE) for one in online]
        return admin_pb2.ListNodesResponse(nodes=[gone, *there])

    made.admin = SimpleNamespace(call=call)
    await made.wait_for_nodes()
    assert said == ["0 of 2 nodes are online", "1 of 2 nodes are online"]
    looks[:] = [["id of node-1"]]
    with pytest.raises(DeadlineExceeded) as raised:
        await made.wait_for_nodes()
    assert raised.value.message == "not online after 60 s: node-0"
    assert clock.now == pytest.approx(65, abs=2)


class Parts:
    """The children of a cluster; one of them fails when it is told to."""

    def __init__(self) -> None:
        self.fails = asyncio.Event()
        self.did: list[str] = []
        self.held = asyncio.Event()

    async def failed(self) -> None:
        await self.fails.wait()
        raise Unavailable("it ended", reason="COMPONENT_ENDED")

    async def stop(self) -> None:
        self.did.append("stop")
        await self.held.wait()

    def kill(self) -> None:
        self.did.append("kill")
        self.held.set()


async def test_work_goes_on_unless_a_component_ends_first(tmp_path: Path) -> None:
    made: Any = LocalCluster(tmp_path, "m")
    made.children = parts = Parts()

    async def work(value: Any = 7, *, ends: bool = False, waits: bool = False) -> Any:
        if ends:
            parts.fails.set()
        if waits:
            await asyncio.Event().wait()
        if isinstance(value, Exception):
            raise value
        return value

    before = asyncio.all_tasks()
    assert await made._or_failure(work()) == 7
    with pytest.raises(ValueError, match="x"):
        await made._or_failure(work(ValueError("x")))
    with pytest.raises(ConfigError, match="x"):
        await made._or_failure(work(ConfigError("x")))
    with pytest.raises(Unavailable, match="it ended"):
        await made._or_failure(work(ends=True, waits=True))
    parts.fails.clear()
    with pytest.raises(Unavailable, match="it ended"):
        await made._or_failure(work(ConfigError("what came of it"), ends=True))
    assert asyncio.all_tasks() == before


async def test_who_cannot_wait_for_the_end_kills_and_still_leaves_nobody(tmp_path: Path) -> None:
    made: Any = LocalCluster(tmp_path / "state", "m")
    async with made:
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        for folder in ("logs", "tmp"):
            assert (tmp_path / "state" / folder).stat().st_mode & 0o777 == 0o700
    async with made:
        pass  # folders that are there already are used
    made.children = parts = Parts()
    leaving = asyncio.ensure_future(made.__aexit__(None, None, None))
    while "stop" not in parts.did:
        await asyncio.sleep(0)
    leaving.cancel()
    await leaving
    assert parts.did == ["stop", "kill"]


@pytest.mark.parametrize("there", [False, True])
async def test_a_model_is_deployed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    said: list[str] = []
    asked: list[Any] = []
    made: Any = LocalCluster(tmp_path, "/models/m", nodes=1, name="mine", say=said.append)
    made.children = Parts()

    async def call(method: str, **fields: Any) -> Any:
        asked.append((method, fields))
        names = ["other", *(["mine"] if there else [])]
        plans = [admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name=name)) for name in names]
        return admin_pb2.ListDeploymentsResponse(
            deployments=[admin_pb2.Deployment(plan=one) for one in plans]
        )

    async def serving(admin: Any, name: str, *, seconds: float, say: Any) -> Any:
        asked.append(("wait", name, seconds))
        return "serving"

    async def offered() -> None:
        asked.append("offered")

    made.admin, made._wait_for_gateway = SimpleNamespace(call=call), offered
    monkeypatch.setattr(module, "wait_until_serving", serving)
    assert await made.deploy(stages=1) == "serving"
    spec = {"name": "mine", "model": "/models/m", "strategy": "pipeline", "stages": 1}
    create = [("CreateDeployment", {"spec": spec, "seconds": 180.0})]
    assert asked == [("ListDeployments", {}), *([] if there else create), ("wait", "mine", 600.0), "offered"]
    assert said == [*([] if there else ["planning mine over one node"]), "waiting for the gateway"]


@pytest.mark.parametrize("keys", [False, True])
async def test_the_gateway_is_waited_for_until_it_offers_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, keys: bool
) -> None:
    made: Any = LocalCluster(tmp_path, "m")
    made.choose_ports()
    made.children = SimpleNamespace(logs={"gateway": "gateway.log"})
    refused = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAUTHENTICATED if keys else grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
    )
    looks: list[Any] = []
    count = 0

    async def list_models(request: Any, **_: Any) -> Any:
        nonlocal count
        count += 1
        look = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(look, Exception):
            raise look
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.Model(name=n, rings=r) for n, r in look]
        )

    @asynccontextmanager
    async def client(address: str) -> AsyncIterator[Any]:
        assert address == made.grpc_address
        yield SimpleNamespace(stub=SimpleNamespace(ListModels=list_models))

    monkeypatch.setattr(module, "inference", client)
    looks[:] = [[], [("demo", 0)], [("other", 1)], refused, [("other", 1), ("demo", 1)]]
    await made._wait_for_gateway()
    assert count == (4 if keys else 5)
    looks[:] = [[("demo", 0)]]
    with pytest.raises(DeadlineExceeded) as raised:
        await made._wait_for_gateway()
    assert (raised.value.reason, raised.value.hint) == ("GATEWAY_NOT_READY", "see gateway.log")
    assert clock.now == pytest.approx(67, abs=3)
