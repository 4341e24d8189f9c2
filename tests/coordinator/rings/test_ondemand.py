"""Models on demand in a real coordinator, with gateways and nodes of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
import structlog
from patience import until

from sealring.coordinator.rings import loads, ondemand
from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import AlreadyExists, EpochEnded, NotFound, ResourceExhausted
from sealring.mesh.member import IDENTITY_KEY, load_machine_state
from sealring.mesh.pki import Role
from sealring.mesh.rpc import from_problem, to_problem
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import Demand, FollowRequest, ModelDemand
from tests.coordinator.conftest import SERVING, Cluster
from tests.coordinator.test_services import Watcher

ONE_FITS = 100_000
"""Bytes of a node that holds the model with one row of 256 tokens, and not twice."""

NOT_LOADED = membership_pb2.LOAD_PHASE_NOT_LOADED
WAITING = membership_pb2.LOAD_PHASE_WAITING
LOADING = membership_pb2.LOAD_PHASE_LOADING
LOADED = membership_pb2.LOAD_PHASE_LOADED
YIELDING = membership_pb2.LOAD_PHASE_YIELDING


class Gate:
    """A gateway of the tests: it notes the models' states, reports demand, holds back models that yield."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.models: dict[str, membership_pb2.ModelState] = {}
        self.seen: list[tuple[str, int]] = []
        self.rings: dict[str, int] = {}
        self.wants: dict[str, ModelDemand] = {}
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def want(self, name: str, **fields: Any) -> None:
        """Reports that a model is asked for once more, with these fields."""
        before = self.wants.get(name, ModelDemand())
        self.wants[name] = ModelDemand(deployment=name, asked=before.asked + 1, **fields)
        await self.report()

    async def one_makes_room_for_two(self) -> None:
        """Model one answers while somebody waits for two."""
        await self.want("one", active=1)
        await self.phase("one", LOADED)
        await self.want("two", waiting=1)
        await self.phase("one", YIELDING)

    async def rest(self, name: str) -> None:
        """Reports that nobody waits for a model or uses it."""
        self.wants[name] = ModelDemand(deployment=name, asked=self.wants[name].asked)
        await self.report()

    async def report(self) -> None:
        models = []
        for name in {*self.wants, *self.models}:
            one = ModelDemand(deployment=name)
            one.MergeFrom(self.wants.get(name, one))
            one.holding = name in self.models and self.models[name].phase == YIELDING
            models.append(one)
        async with self._writing:  # gRPC takes one write at a time
            await self._watcher.call.write(FollowRequest(demand=Demand(models=models)))

    async def until(self, check: Callable[[], Any]) -> None:
        async with self._changed:
            async with asyncio.timeout(200):
                await self._changed.wait_for(check)

    async def phase(self, name: str, phase: int) -> membership_pb2.ModelState:
        await self.until(lambda: name in self.models and self.models[name].phase == phase)
        return self.models[name]

    async def reason(self, name: str) -> str:
        """What a model waits for."""
        await self.until(lambda: name in self.models and self.models[name].reason)
        return self.models[name].reason

    async def refused(self, name: str) -> str:
        """The reason why a model could not be loaded."""
        await self.until(lambda: name in self.models and self.models[name].problem.reason)
        return self.models[name].problem.reason

    async def close(self) -> None:
        self._reading.cancel()
        await self._watcher.close()

    async def _read(self) -> None:
        while (event := await self._watcher.call.read()) is not grpc.aio.EOF:
            kind = event.WhichOneof("event")
            if kind == "model":
                self.models[event.model.deployment] = event.model
                self.seen.append((event.model.deployment, event.model.phase))
                await self.report()
            elif kind == "model_gone":
                self.models.pop(event.model_gone.deployment, None)
            elif kind == "ring":
                self.rings[event.ring.ring] = event.ring.phase
            elif kind == "gone":
                self.rings.pop(event.gone.ring, None)
            async with self._changed:
                self._changed.notify_all()


async def gate(cluster: Cluster, name: str = "gate", *, join: bool = True) -> Gate:
    if join:
        await cluster.join(name, role=Role.GATEWAY)
    material = load_machine_state(cluster.folder / name).tls
    signer = SoftwareSigner.load(cluster.folder / name / IDENTITY_KEY)
    return Gate(await Watcher(cluster, material, signer).start())


async def deploy(cluster: Cluster, name: str, **spec: Any) -> admin_pb2.DeploymentPlan:
    fields = {"model": "demo", "on_demand": True, "context": 256, "max_rows": 1} | spec
    request = admin_pb2.CreateDeploymentRequest(spec=admin_pb2.DeploymentSpec(name=name, **fields))
    plan: admin_pb2.DeploymentPlan = (await cluster.call("CreateDeployment", request)).plan
    return plan


async def deployments(cluster: Cluster) -> dict[str, admin_pb2.Deployment]:
    answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    return {one.plan.spec.name: one for one in answer.deployments}


@pytest.fixture
async def house(cluster: Cluster) -> AsyncIterator[Any]:
    """One node that holds one of two models, and a gateway; turns last for a moment."""
    cluster.coordinator.cluster.on_demand.loads.turn = 0.2
    await cluster.node("alpha", memory=ONE_FITS)
    for name in ("one", "two"):
        await deploy(cluster, name)
    watching = await gate(cluster)
    await watching.phase("two", NOT_LOADED)
    yield cluster, watching
    await watching.close()


async def test_a_model_is_placed_when_it_is_asked_for(house: Any) -> None:
    cluster, gateway = house
    before = (await deployments(cluster))["one"]
    assert (list(before.rings), before.load.phase) == ([], NOT_LOADED)
    assert gateway.models["one"].rings == ["one-0"]
    assert gateway.models["one"].context == 256
    await gateway.want("one", waiting=1)
    assert (await gateway.phase("one", LOADED)).expires > 0
    assert gateway.rings["one-0"] == SERVING
    after = (await deployments(cluster))["one"]
    assert (after.rings[0].phase, after.load.phase, after.load.waiting) == (SERVING, LOADED, 1)
    assert after.plan.spec.context == 256


async def test_gateways_hear_how_far_a_load_is(cluster: Cluster) -> None:
    node = await cluster.node("alpha", prepare=False)
    await deploy(cluster, "one")
    gateway = await gate(cluster)
    state = await gateway.phase("one", NOT_LOADED)
    assert (state.digest, state.card.parameters, state.card.precision) == ("ab" * 32, 2500, "float32")
    await gateway.want("one", waiting=1)
    place = await node.wait_for("prepare")
    progress = membership_pb2.EpochProgress(ring=place.ring, epoch=place.epoch, what="loading", fraction=0.58)
    await node.send(progress=progress)
    await gateway.until(lambda: gateway.models["one"].progress == 55)
    assert gateway.models["one"].reason == "loading 55 %"
    prepared = membership_pb2.EpochPrepared(ring=place.ring, epoch=place.epoch, links=[node.link])
    await node.send(prepared=prepared)
    loaded = await gateway.phase("one", LOADED)
    assert (loaded.progress, loaded.reason) == (0, "")
    await gateway.close()


async def test_two_models_that_do_not_fit_together_take_turns(house: Any) -> None:
    cluster, gateway = house
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.rest("one")
    await gateway.want("two", waiting=1)
    await gateway.phase("two", LOADED)
    assert gateway.models["one"].phase == NOT_LOADED
    assert "one-0" not in gateway.rings
    ended = await cluster.nodes[0].wait_for("end", lambda end: end.ring == "one-0")
    assert ended.unload
    await gateway.rest("two")
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)


async def test_no_model_is_unloaded_while_it_answers(house: Any) -> None:
    _, gateway = house
    await gateway.one_makes_room_for_two()
    await gateway.until(lambda: gateway.models["two"].reason == "one is unloaded for it")
    assert gateway.models["one"].reason == (await deployments(house[0]))["one"].load.reason
    assert gateway.models["one"].reason == "it makes room for two"
    await gateway.want("one", active=1, waiting=3)
    await gateway.want("one", active=1, waiting=2)
    assert gateway.rings["one-0"] == SERVING
    await gateway.want("one", waiting=2)
    await gateway.phase("two", LOADED)
    assert ("one", WAITING) in gateway.seen, "its waiting requests have the next turn"


async def test_nodes_are_not_asked_for_profiles_while_a_model_that_makes_room_still_answers(
    house: Any,
) -> None:
    cluster, gateway = house
    node = cluster.nodes[0]

    def asked() -> int:
        return sum(one.HasField("profile") for one in node.messages)

    await gateway.one_makes_room_for_two()
    before, beats = asked(), node.beats
    await until(lambda: node.beats >= beats + 20)
    assert asked() == before
    await gateway.rest("one")
    await gateway.phase("two", LOADED)
    assert asked() > before, "once there is room, they are asked what they hold"


async def test_nodes_that_compute_for_a_gateway_that_says_nothing_count_as_use(house: Any) -> None:
    cluster, gateway = house
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.rest("one")
    cluster.nodes[0].busy = True
    await gateway.want("two", waiting=1)
    await gateway.phase("one", YIELDING)
    beats = cluster.nodes[0].beats
    await until(lambda: cluster.nodes[0].beats >= beats + 20)
    assert gateway.rings["one-0"] == SERVING
    cluster.nodes[0].busy = False
    await gateway.phase("two", LOADED)


async def test_a_model_stays_for_its_turn_and_status_says_so(house: Any) -> None:
    cluster, gateway = house
    cluster.coordinator.cluster.on_demand.loads.turn = 3600.0
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.rest("one")
    await gateway.want("two", waiting=1)
    await gateway.until(lambda: gateway.models["two"].reason)
    assert gateway.models["two"].seconds >= 3590
    load = (await deployments(cluster))["two"].load
    assert load.phase == WAITING
    assert "one" in load.reason


async def test_an_idle_model_is_unloaded(cluster: Cluster) -> None:
    cluster.coordinator.cluster.on_demand.loads.turn = 0.2
    await cluster.node("alpha")
    await deploy(cluster, "one", keep_alive=1)
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.rest("one")
    await gateway.phase("one", NOT_LOADED)
    await cluster.nodes[0].wait_for("end", lambda end: end.unload)
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.close()


async def test_a_request_may_say_how_long_its_model_stays(house: Any) -> None:
    _, gateway = house
    await gateway.want("one", waiting=1, keep_alive=-1)
    await gateway.phase("one", LOADED)
    await gateway.want("one", keep_alive=-1)
    await gateway.until(lambda: gateway.models["one"].expires == 0)
    await gateway.want("one", keep_alive=0)
    await gateway.phase("one", NOT_LOADED)


async def test_a_client_of_one_gateway_unloads_no_model_of_anothers(house: Any) -> None:
    cluster, gateway = house
    other = await gate(cluster, "other")
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.rest("one")
    load = cluster.coordinator.cluster.on_demand.loads.models["one"]
    await other.want("one", keep_alive=0)
    await until(lambda: load.heard.keep_alive is not None)
    assert 0 < load.keep_alive <= 900, "the first gateway's client named no time"
    await gateway.want("one", keep_alive=0)
    await gateway.phase("one", NOT_LOADED)
    await other.close()


async def test_a_model_without_room_fails_what_waits_for_it(cluster: Cluster) -> None:
    await cluster.node("alpha", memory=ONE_FITS)
    await deploy(cluster, "two")
    await deploy(cluster, "one", on_demand=False)
    gateway = await gate(cluster)
    await gateway.want("two", waiting=1)
    assert await gateway.refused("two") == "DOES_NOT_FIT"
    assert gateway.models["two"].phase == NOT_LOADED
    assert (await deployments(cluster))["two"].load.reason
    await gateway.close()


async def test_a_model_whose_turn_cannot_be_written_down_is_refused(house: Any) -> None:
    cluster, gateway = house
    await gateway.one_makes_room_for_two()
    with cluster.coordinator.store.transaction() as connection:
        pass  # the connection outlives it
    connection.execute("PRAGMA query_only = ON")
    await gateway.rest("one")
    assert await gateway.refused("two") == "STATE_UNWRITABLE"
    await gateway.phase("one", LOADED)
    connection.execute("PRAGMA query_only = OFF")


async def test_what_could_never_fit_is_refused_at_once(cluster: Cluster) -> None:
    await cluster.node("alpha", memory=5_000)
    with pytest.raises(ResourceExhausted):
        await deploy(cluster, "one")
    assert not await deployments(cluster)


async def test_a_deleted_model_is_forgotten_whatever_it_waits_for(house: Any) -> None:
    cluster, gateway = house
    await gateway.one_makes_room_for_two()
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="two"))
    await gateway.until(lambda: "two" not in gateway.models)
    await gateway.phase("one", LOADED)
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="one"))
    await gateway.until(lambda: not gateway.models and not gateway.rings)


async def test_a_member_that_dies_while_it_loads_is_done_without(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "LOST_SECONDS", 0.2)
    first = await cluster.node("alpha", prepare=False)
    await deploy(cluster, "one", members=[first.id])
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="one"))
    await deploy(cluster, "one")
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    await first.wait_for("prepare")
    await cluster.node("beta")
    await first.stop()
    await gateway.phase("one", LOADED)
    plan = (await deployments(cluster))["one"].plan
    assert [stage.member_name for stage in plan.rings[0].stages] == ["beta"]
    await gateway.close()


async def test_two_gateways_that_ask_at_once_get_one_load(house: Any) -> None:
    cluster, gateway = house
    other = await gate(cluster, "second")
    await asyncio.gather(gateway.want("one", waiting=1), other.want("one", waiting=2))
    await asyncio.gather(gateway.phase("one", LOADED), other.phase("one", LOADED))
    loads = [
        entry
        for entry in cluster.coordinator.store.audit.entries(after=0, limit=100)
        if entry.action == "load_model"
    ]
    assert len(loads) == 1
    await other.want("two", waiting=1)
    await gateway.want("one", active=1)
    await other.phase("one", YIELDING)
    await other.close()
    await gateway.phase("one", LOADED)


async def test_the_next_coordinator_goes_on_with_what_is_loaded(start_cluster: Any) -> None:
    cluster = await start_cluster()
    node = await cluster.node("alpha", memory=ONE_FITS)
    for name in ("one", "two"):
        await deploy(cluster, name, keep_alive=0)
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    await gateway.phase("one", LOADED)
    await gateway.close()
    await cluster.close()
    again = await start_cluster()
    try:
        await again.back(node)
        gateway = await gate(again, join=False)
        await gateway.phase("one", LOADED)
        await gateway.phase("two", NOT_LOADED)
        assert "end" not in {one.WhichOneof("message") for one in again.nodes[0].messages}
        await gateway.close()
    finally:
        await again.close()


async def test_names_are_taken_by_names_and_aliases(cluster: Cluster) -> None:
    await cluster.node("alpha")
    await deploy(cluster, "one", aliases=["gpt-4o", "llama3.2:3b"])
    for name, aliases in (("two", ["gpt-4o"]), ("two", ["one"]), ("gpt-4o", [])):
        with pytest.raises(AlreadyExists) as caught:
            await deploy(cluster, name, aliases=aliases)
        assert caught.value.reason == "NAME_TAKEN"
    await deploy(cluster, "three", on_demand=False, aliases=["claude-sonnet"])
    gateway = await gate(cluster)
    await gateway.until(lambda: "three" in gateway.models)
    assert list(gateway.models["three"].aliases) == ["claude-sonnet"]
    assert gateway.models["three"].phase == membership_pb2.LOAD_PHASE_UNSPECIFIED
    await gateway.close()


async def test_a_node_that_sleeps_while_it_loads_a_model_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it sleeps: it went after the model was asked for."""
    monkeypatch.setattr(ondemand, "LOST_SECONDS", 0.2)
    cluster.coordinator.cluster.on_demand.absent_seconds = 0.0
    node = await cluster.node("alpha", prepare=False)
    await deploy(cluster, "one")
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    await node.wait_for("prepare")
    await node.stop()
    await gateway.until(lambda: gateway.models["one"].reason == "it waits for alpha")
    assert not gateway.models["one"].problem.code
    await cluster.back(node)
    await gateway.phase("one", LOADED)
    await gateway.close()


async def test_a_model_whose_nodes_have_left_fails_what_waits_for_it_until_they_come(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error that clients repeat: the nodes may be asleep."""
    monkeypatch.setattr(loads, "RETRY_SECONDS", 3600)
    cluster.coordinator.cluster.on_demand.absent_seconds = 0.0
    node = await cluster.node("alpha")
    await deploy(cluster, "one")
    gateway = await gate(cluster)
    await node.stop()
    # else it goes while it is waited for
    await until(lambda: cluster.coordinator.sessions.find(node.id) is None)
    await gateway.want("one", waiting=1)
    assert await gateway.refused("one") == "MODEL_NOT_LOADED"
    problem = from_problem(gateway.models["one"].problem)
    assert (problem.code, problem.metadata["retry_after"]) == ("UNAVAILABLE", "3600")
    assert "alpha is away" in problem.message
    await cluster.back(node)
    await gateway.phase("one", LOADED)
    await gateway.close()


@pytest.mark.parametrize(("stages", "reason"), [(1, "NODES_SILENT"), (2, "MODEL_NOT_LOADED")])
async def test_a_model_whose_nodes_say_nothing_is_there_and_unavailable(
    start_cluster: Any, stages: int, reason: str
) -> None:
    """Whether nobody says that it has the model, or too few for what was deployed."""
    cluster = await start_cluster(profile_timeout=1.0)
    nodes = [await cluster.node(name) for name in ("alpha", "beta")]
    await deploy(cluster, "one", stages=stages)
    for node in nodes[stages - 1 :]:
        node.profiles = False
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    assert await gateway.refused("one") == reason
    problem = from_problem(gateway.models["one"].problem)
    assert (problem.code, int(problem.metadata["retry_after"]) > 0) == ("UNAVAILABLE", True)
    assert "beta" in problem.message
    await gateway.close()


@pytest.mark.parametrize("change", ["drain", "deployment"])
async def test_a_refusal_ends_with_what_it_is_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What is changed may be all that was in the way."""
    monkeypatch.setattr(loads, "RETRY_SECONDS", 3600)
    node = await cluster.node("alpha", memory=ONE_FITS)
    await deploy(cluster, "one")
    if change == "drain":
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=node.id))
    else:
        await deploy(cluster, "two", on_demand=False)
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    assert await gateway.refused("one") == ("NOT_ENOUGH_NODES" if change == "drain" else "DOES_NOT_FIT")
    if change == "drain":
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=node.id, undo=True))
    else:
        await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="two"))
    await gateway.phase("one", LOADED)
    await gateway.close()


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("has", [True, False])
async def test_nodes_that_come_while_others_are_asked_for_a_model_are_asked_too(
    cluster: Cluster, has: bool, drained: bool
) -> None:
    """Whether too few nodes have the model without them, or none; and whether they were away or drained."""
    alpha, beta = [await cluster.node(name) for name in ("alpha", "beta")]
    await deploy(cluster, "one", stages=2 if has else 1)
    gateway = await gate(cluster)
    sessions = cluster.coordinator.sessions
    if drained:
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=beta.id))
    else:
        await beta.stop()
        await until(lambda: sessions.find(beta.id) is None)
    before = (await alpha.wait_for("profile")).id
    alpha.profiles = False
    await gateway.want("one", waiting=1)
    request = await alpha.wait_for("profile", lambda one: one.id > before)
    if drained:
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=beta.id, undo=True))
    else:
        await cluster.back(beta)
        while (session := sessions.find(beta.id)) is None or session.heartbeat is None:
            await asyncio.sleep(0.01)
    alpha.profiles = True
    if has:
        await alpha.tell_profile(request)
    else:
        result = membership_pb2.ProfileResult(id=request.id, problem=to_problem(NotFound("it is not here")))
        await alpha.send(profile=result)
    await gateway.phase("one", LOADED)
    phases = [phase for _, phase in gateway.seen]
    assert NOT_LOADED not in phases[phases.index(WAITING) :]
    await gateway.close()


async def test_a_refusal_that_nodes_have_overtaken_holds_for_nobody(cluster: Cluster) -> None:
    """Nobody waits when it is found, and the next to ask would get it."""
    alpha, beta = [await cluster.node(name) for name in ("alpha", "beta")]
    await deploy(cluster, "one", stages=2)
    gateway = await gate(cluster)
    sessions = cluster.coordinator.sessions
    await beta.stop()
    await until(lambda: sessions.find(beta.id) is None)
    before = (await alpha.wait_for("profile")).id
    alpha.profiles = False
    await gateway.want("one", waiting=1)
    request = await alpha.wait_for("profile", lambda one: one.id > before)
    await gateway.rest("one")
    await gateway.phase("one", NOT_LOADED)
    await cluster.back(beta)
    await until(lambda: sessions.find(beta.id) is not None)
    alpha.profiles = True
    with structlog.testing.capture_logs() as logs:
        beats = alpha.beats
        await alpha.tell_profile(request)
        await until(lambda: alpha.beats >= beats + 10)
        await gateway.want("one", waiting=1)
        await gateway.phase("one", LOADED)
    assert "model_refused" not in [one["event"] for one in logs]
    await gateway.close()


async def test_nodes_that_have_just_gone_or_not_come_yet_are_waited_for(start_cluster: Any) -> None:
    cluster = await start_cluster()
    cluster.coordinator.cluster.on_demand.loads.turn = 0.2
    node = await cluster.node("alpha")
    await deploy(cluster, "one")
    gateway = await gate(cluster)
    await node.stop()
    await gateway.want("one", waiting=1)
    assert await gateway.reason("one") == "it waits for alpha"
    await cluster.back(node)
    await gateway.phase("one", LOADED)
    await gateway.want("one", keep_alive=0)
    await gateway.phase("one", NOT_LOADED)
    await gateway.close()
    await cluster.close()
    again = await start_cluster()
    try:
        gateway = await gate(again, join=False)
        await gateway.want("one", waiting=1)
        assert await gateway.reason("one") == "it waits for alpha"
        assert (await deployments(again))["one"].load.phase == WAITING
        await again.back(node)
        await gateway.phase("one", LOADED)
        await gateway.close()
    finally:
        await again.close()


async def test_the_next_coordinator_gives_up_a_load_that_fails(start_cluster: Any) -> None:
    cluster = await start_cluster()
    node = await cluster.node("alpha", prepare=False)
    await deploy(cluster, "one")
    gateway = await gate(cluster)
    await gateway.want("one", waiting=1)
    await node.wait_for("prepare")
    await gateway.close()
    await cluster.close()
    again = await start_cluster()
    try:
        node = await again.node("alpha", join=False, prepare=False)
        gateway = await gate(again, join=False)
        await gateway.want("one", waiting=1)
        failing = asyncio.create_task(fail_every_epoch(node))
        assert await gateway.refused("one") == "MODEL_NOT_LOADED"
        failing.cancel()
        await gateway.close()
    finally:
        await again.close()


async def fail_every_epoch(node: Any) -> None:
    epochs = set[int]()
    while True:
        place = await node.wait_for("prepare", lambda one: one.epoch not in epochs)
        epochs.add(place.epoch)
        problem = to_problem(EpochEnded("its engine is broken"))
        fault = membership_pb2.EpochFault(ring=place.ring, epoch=place.epoch, problem=problem)
        await node.send(fault=fault)
