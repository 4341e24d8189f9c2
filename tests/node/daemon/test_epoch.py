import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from playedengine import PlayedEngine

from sealring.mesh.errors import Conflict, DeadlineExceeded, EpochEnded, FailedPrecondition
from sealring.mesh.roster import RingMember
from sealring.mesh.system.pace import Reached
from sealring.node.daemon.epoch import (
    MAX_GUESTS,
    LinkSecrets,
    MemberEpoch,
    Phase,
)
from sealring.node.daemon.plan import rdma_devices
from sealring.node.wire.channel import create_channel
from sealring.v1 import control_pb2, engine_pb2, membership_pb2, trace_pb2


class Plan:
    ring, epoch, rank, prefill_chunk, max_rows, kv_budget = "demo-0", 3, 0, 16, 4, 1000
    speculate = True

    def __init__(self, size: int, backend: str = "") -> None:
        self.size, self.backend, self.seals_rows = size, backend, size > 2
        self.members = [RingMember(id, rank, (0, 4)) for rank, id in enumerate(("aaaaa", "bbbbb")[:size])]


class Carrier:
    """Waits for the test wherever an epoch waits for it."""

    def __init__(self, gate: Callable[[str], Awaitable[None]]) -> None:
        self._gate = gate
        self.start = engine_pb2.StartCarrier()
        self.log: list[str] = []

    def give(self, start: engine_pb2.StartCarrier) -> None:
        self.start.MergeFrom(start)
        self.log.append("give")

    async def form(self, seconds: float) -> None:
        self.log.append("form")
        await self._gate("form")

    @property
    def taken(self) -> engine_pb2.CarrierUp:
        way = engine_pb2.RingWay(address="10.0.0.2:9")
        return engine_pb2.CarrierUp(way=way, round_trip_us=200, bytes_per_second=10**9)

    async def trace(self, since: int) -> trace_pb2.ProcessTrace:
        return trace_pb2.ProcessTrace(since=since + 1)

    async def stop(self) -> None:
        self.log.append("stop")


class Gateway:
    def __init__(self, *, used: bool = True) -> None:
        self.id, self.used, self.guest, self.goodbye = "g", used, 0, ""
        self.problems: list[str] = []
        self.said: list[Any] = []

    def say_goodbye(self, reason: str) -> None:
        self.said.append(reason)

    def guest_left(self, guest: int) -> None:
        self.said.append(guest)

    def epoch_over(self, problem: membership_pb2.Problem) -> None:
        self.problems.append(problem.reason)


class Workshop:
    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Future[None]] = {}
        self.made_engine = PlayedEngine(self.gate)
        self.made_carrier: Carrier | None = None
        self.reports: list[str] = []
        self.channels: list[Any] = []
        self.released = 0
        self.settlements = 0
        self.rdma: list[str] = []
        self.again: Any = None
        self.on_fault: Any = None

    async def gate(self, name: str) -> None:
        await self.gates.setdefault(name, asyncio.get_running_loop().create_future())

    def open(self, name: str, error: Exception | None = None) -> None:
        gate = self.gates.setdefault(name, asyncio.get_running_loop().create_future())
        if not gate.done():
            gate.set_exception(error) if error else gate.set_result(None)
            gate.exception()  # whether or not somebody waits

    async def engine(self, plan: Any, progress: Any) -> PlayedEngine:
        progress(Reached("loading", 1, 2))
        await self.gate("engine")
        return self.made_engine

    async def prefix_disk(
        self, plan: Any, caches: Sequence[bytes], former: Sequence[Any]
    ) -> engine_pb2.PrefixDisk:
        return engine_pb2.PrefixDisk(root=f"/prefixes of {len(caches)}")

    def channel(self) -> Any:
        self.channels.append(create_channel())
        return self.channels[-1]

    async def carrier(self, plan: Any, channel: Any, on_fault: Any) -> Carrier:
        self.on_fault = on_fault
        await self.gate("carrier")
        self.made_carrier = Carrier(self.gate)
        return self.made_carrier

    async def handshakes(self, plan: Any, again: Any) -> LinkSecrets:
        self.again = again
        await self.gate("handshakes")
        return LinkSecrets(b"out", b"in", b"out pass", b"in pass", "b:2", [], b"row")

    def settled(self, plan: Any) -> None:
        self.settlements += 1

    async def rotate(self, plan: Any, gate: Any, carrier: Any) -> None:
        await self.gate("rotation")

    def release(self, plan: Any) -> None:
        self.released += 1

    def report(self, message: membership_pb2.MemberMessage) -> None:
        kind = message.WhichOneof("message")
        if kind != "progress":
            self.reports.append(kind)
        if kind == "prepared":
            self.address, self.prepared = message.prepared.group_address, message.prepared
        elif kind == "fault":
            self.reason = message.fault.problem.reason

    def group_address(self) -> str:
        return "a:1"

    def rdma_devices(self, plan: Any) -> list[str]:
        return rdma_devices(plan, self.rdma)


GATES = ("engine", "carrier", "handshakes", "open", "form")


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def prepared(plan: Any, rdma: Sequence[str] = ()) -> tuple[Workshop, MemberEpoch]:
    shop = Workshop()
    shop.rdma = list(rdma)
    epoch = MemberEpoch(plan, shop)
    epoch.prepare()
    for gate in GATES[:4]:
        assert epoch.phase is Phase.PREPARING
        shop.open(gate)
        await settle()
    opened = shop.made_engine.opened
    assert opened is not None
    assert (opened.epoch, opened.speculate, opened.sealed) == (3, True, plan.seals_rows)
    assert shop.made_engine.descriptors == (4 if plan.size > 1 else 0)
    return shop, epoch


@pytest.mark.parametrize("size", [1, 2])
async def test_the_whole_way(size: int) -> None:
    shop, epoch = await prepared(Plan(size))
    assert epoch.phase is Phase.PREPARED
    with pytest.raises(FailedPrecondition):
        epoch.attach(Gateway())
    with pytest.raises(FailedPrecondition):
        await epoch.trace(0)
    epoch.commit()
    shop.open("form")
    await settle()
    assert epoch.phase is Phase.UP
    assert shop.reports == ["prepared", "up"]
    assert [one.since for one in await epoch.trace(40)] == [40, 41][:size]
    gateway, guest = Gateway(), Gateway()
    epoch.attach(gateway)
    epoch.attach(guest)
    epoch.end("done")
    await epoch.closed()
    assert shop.reports == ["prepared", "up"]
    assert gateway.problems == guest.problems == ["EPOCH_ENDED"]
    assert shop.made_engine.log == ["open", "close"]
    assert shop.released == 1


@pytest.mark.parametrize("caches", [[b"own", b"other"], [], [b"strange", b"other"]])
async def test_prefixes_are_stored_once_all_members_have_said_what_they_compute_with(
    caches: list[bytes],
) -> None:
    shop, epoch = await prepared(Plan(2))
    assert shop.prepared.caches == b"own"
    epoch.commit([], caches)
    shop.open("form")
    await settle()
    assert epoch.phase is Phase.UP
    stored = b"own" in caches
    assert (epoch.recalls, shop.made_engine.disks) == (stored, ["/prefixes of 2" if stored else ""])
    epoch.end("done")
    await epoch.closed()


async def test_what_steps_take_is_told_of_one_row_and_of_several() -> None:
    """And nothing of chunks of prompts."""
    shop = Workshop()
    times = [(1, 1, 900, 0), (1, 8, 1000, 0), (16, 1, 2500, 0), (1, 512, 9000, 0), (16, 1, 2700, 512)]
    steps = [
        control_pb2.StepTime(rows=rows, tokens=tokens, microseconds=took, context=context)
        for rows, tokens, took, context in times
    ]
    shop.made_engine.loaded = engine_pb2.StageLoaded(times=steps)
    epoch = MemberEpoch(Plan(1), shop)
    epoch.prepare()
    for gate in GATES:
        shop.open(gate)
    await settle()
    told = shop.prepared
    found = [(one.rows, one.microseconds, one.context) for one in told.times]
    assert found == [(1, 900, 0), (16, 2500, 0), (16, 2700, 512)]
    assert told.computes_on == shop.made_engine.computes_on
    epoch.end("done")
    await epoch.closed()


async def test_without_a_device_for_a_rank_nothing_is_loaded_for_jaccl() -> None:
    shop = Workshop()
    shop.rdma = ["cccc=rdma_en2", "aaaa=rdma_en3"]
    epoch = MemberEpoch(Plan(2, backend="jaccl"), shop)
    epoch.prepare()
    await settle()
    await epoch.closed()
    assert (shop.reports, shop.reason) == (["fault"], "NO_GROUP")


@pytest.mark.parametrize("fails", ["", "in time", "by its end"])
@pytest.mark.parametrize("backend", ["ring", "jaccl"])
async def test_the_engine_of_a_tensor_ring_joins_its_group_and_ends_with_the_epoch(
    fails: str, backend: str
) -> None:
    shop, epoch = await prepared(Plan(2, backend=backend), rdma=["cccc=rdma_en2", "bbbb=rdma_en3"])
    assert shop.address == "a:1"
    epoch.commit(["a:1", "b:1"])
    shop.open("form")
    await settle()
    assert epoch.phase is Phase.FORMING
    if fails == "by its end":
        epoch.engine_fault(EpochEnded("the engine process ended", reason="CHILD_ENDED"))
    shop.open("join", DeadlineExceeded("it does not come") if fails else None)
    await settle()
    assert epoch.phase is (Phase.ENDED if fails else Phase.UP)
    epoch.end("done")
    await epoch.closed()
    devices = "  rdma_en3" * (backend == "jaccl")  # none at its own rank
    assert shop.made_engine.log == ["open", f"join {backend} a:1 b:1{devices}", "kill", "stop"]
    assert not fails or shop.reason == "NO_GROUP"


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["a:1"], "BAD_EPOCH"),
        (["a:2", "b:1"], "BAD_EPOCH"),
        (["a:1", "b"], "BAD_ADDRESS"),
    ],
)
async def test_a_tensor_ring_is_not_formed_without_every_address(addresses: list[str], reason: str) -> None:
    shop, epoch = await prepared(Plan(2, backend="ring"))
    epoch.commit(addresses)
    shop.open("form")
    await settle()
    await epoch.closed()
    assert shop.reason == reason


async def up(plan: Any) -> MemberEpoch:
    shop, epoch = await prepared(plan)
    epoch.commit()
    shop.open("form")
    await settle()
    assert epoch.phase is Phase.UP
    return epoch


async def test_one_gateway_schedules_and_others_are_guests_of_the_head() -> None:
    epoch = await up(Plan(2))
    first, guests = Gateway(used=False), [Gateway() for _ in range(MAX_GUESTS)]
    for gateway in (first, *guests):
        epoch.attach(gateway)
    assert [one.guest for one in guests] == list(range(1, MAX_GUESTS + 1))
    with pytest.raises(Conflict):
        epoch.attach(Gateway())
    epoch.detach(guests.pop())
    assert first.said == [MAX_GUESTS], "what it has forwarded is for nobody"
    guests[0].id = "evicted"
    epoch.dismiss({"g"}, "GATEWAY_REMOVED")
    assert [one.said for one in guests] == [["GATEWAY_REMOVED"], *([] for _ in guests[1:])]
    epoch.detach(first)
    assert all(one.said[-1] == "NOBODY_SCHEDULES" for one in guests)
    with pytest.raises(FailedPrecondition, match="no other gateway"):
        epoch.attach(Gateway(), yields=True)
    assert (epoch.phase, epoch.gateway, epoch.guests) == (Phase.UP, None, {})
    epoch.attach(Gateway())
    assert epoch.gateway is not None
    assert epoch.gateway.guest == 0
    late = Gateway()
    epoch.attach(late, yields=True)
    assert late.guest > 0
    epoch.end("done")
    await epoch.closed()


async def test_nobody_but_the_head_has_guests() -> None:
    plan = Plan(2)
    plan.rank = 1
    epoch = await up(plan)
    epoch.attach(Gateway())
    with pytest.raises(Conflict):
        epoch.attach(Gateway())
    epoch.end("done")
    await epoch.closed()


@pytest.mark.parametrize("when", ["before the keys are given", "when they have been"])
async def test_a_repeated_handshake_brings_the_keys_that_count(when: str) -> None:
    shop = Workshop()
    epoch = MemberEpoch(Plan(3), shop)
    epoch.prepare()
    for gate in ("engine", "carrier", "handshakes"):
        shop.open(gate)
        await settle()
    newer = LinkSecrets(incoming_keys=b"newer in", incoming_pass=b"newer pass", row_key=b"newer")
    if when == "before the keys are given":
        shop.again(newer)
    shop.open("open")
    await settle()
    if when == "when they have been":
        assert shop.made_carrier.start.incoming_keys == b"in"
        shop.again(newer)
    start = shop.made_carrier.start
    assert (start.outgoing_keys, start.outgoing_pass, start.next_address) == (b"out", b"out pass", "b:2")
    assert (start.incoming_keys, start.incoming_pass) == (b"newer in", b"newer pass")
    assert shop.settlements == 0
    assert shop.made_engine.opened is not None
    assert shop.made_engine.opened.sealed
    assert shop.made_engine.row_keys == []
    epoch.commit()
    assert shop.settlements == 1
    shop.again(LinkSecrets(incoming_keys=b"too late", row_key=b"too late"))
    assert shop.made_carrier.start.incoming_keys == b"newer in"
    await settle()
    assert shop.made_engine.row_keys == [b"newer"], "of the session whose keys the carrier has"
    epoch.end("done")
    await epoch.closed()


async def test_handshakes_do_not_wait_for_the_epoch_before() -> None:
    blocked = asyncio.get_running_loop().create_future()

    class Slow(Workshop):
        async def engine(self, plan: Any, progress: Any) -> PlayedEngine:
            try:
                return await super().engine(plan, progress)
            except asyncio.CancelledError:
                await blocked
                raise

    first_shop, second_shop = Slow(), Workshop()
    first = MemberEpoch(Plan(2), first_shop)
    first.prepare()
    await settle()
    first.end("superseded")
    second = MemberEpoch(Plan(2), second_shop, after=first)
    second.prepare()
    await settle()
    assert "handshakes" in second_shop.gates
    assert not {"engine", "carrier"} & set(second_shop.gates)
    blocked.set_result(None)
    await settle()
    assert {"engine", "carrier"} <= set(second_shop.gates)
    second.end("done")
    await second.closed()


async def test_an_engine_that_does_not_close_is_killed() -> None:
    shop = Workshop()
    shop.made_engine.close_fails = True
    epoch = MemberEpoch(Plan(1), shop)
    epoch.prepare()
    shop.open("engine")
    shop.open("open")
    await settle()
    epoch.fault(EpochEnded("x"))
    await epoch.closed()
    assert shop.made_engine.log == ["open", "close", "kill"]


@pytest.mark.parametrize("part", ["carrier", "engine"])
async def test_a_part_that_does_not_end_holds_up_no_other(part: str) -> None:
    shop, epoch = await prepared(Plan(2))
    assert epoch.phase is Phase.PREPARED

    def fail(*_: Any) -> Any:
        raise OSError(5, "a fault")

    carrier, engine = shop.made_carrier, shop.made_engine
    assert carrier is not None
    if part == "carrier":
        carrier.stop = fail  # type: ignore[method-assign]
    else:
        engine.close_epoch = fail  # type: ignore[method-assign]
    epoch.fault(EpochEnded("x"))
    await epoch.closed()
    assert shop.released == 1
    assert ("kill" in engine.log) == (part == "engine")
    assert ("close" in engine.log) == (part != "engine")
    assert ("stop" in carrier.log) == (part != "carrier")


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (EpochEnded("gone", reason="PEER_LOST"), [("warning", "PEER_LOST")]),
        (EpochEnded("left", reason="GATEWAY_LEFT"), [("info", "GATEWAY_LEFT")]),
        (ValueError("a mistake of ours"), [("error", ""), ("warning", "INTERNAL")]),
    ],
)
async def test_a_fault_is_logged_as_what_it_is_and_told_once(
    error: Exception, logged: list[tuple[str, str]]
) -> None:
    shop = Workshop()
    with structlog.testing.capture_logs() as logs:
        epoch = MemberEpoch(Plan(1), shop)
        epoch.fault(error)
        epoch.fault(error)
        epoch.end("done")
        await epoch.closed()
    found = [
        (one["log_level"], one.get("reason", ""))
        for one in logs
        if "fault" in one["event"] or "exc_info" in one
    ]
    assert found == logged
    assert shop.reports == ["fault"]


SECRETS = {
    "outgoing_keys": b"a",
    "incoming_keys": b"b",
    "outgoing_pass": b"c",
    "incoming_pass": b"d",
    "next_address": "e:1",
    "row_key": b"g",
}


@pytest.mark.parametrize("field", list(SECRETS))
def test_a_repeated_handshake_replaces_what_it_brings_and_nothing_else(field: str) -> None:
    infos = [membership_pb2.LinkInfo(from_rank=1)]
    first = LinkSecrets(**SECRETS, infos=infos)
    new: Any = "f:2" if field == "next_address" else b"new"
    assert first.renewed(LinkSecrets(**{field: new})) == LinkSecrets(**(SECRETS | {field: new}), infos=infos)
    assert LinkSecrets(infos=infos).renewed(LinkSecrets(**SECRETS)) == first
    assert first.start() == engine_pb2.StartCarrier(**{n: x for n, x in SECRETS.items() if n != "row_key"})
    assert LinkSecrets() == LinkSecrets(b"", b"", b"", b"", "", [])


STEERING = (
    "rotation",
    "rotation fails",
    "commit",
    "carrier_fault",
    "engine fault",
    "end",
    "attach",
    "detach",
)
FAILURES = tuple(f"{gate} fails" for gate in GATES)
EVENTS = st.sampled_from([*GATES, *FAILURES, *STEERING, "settle", "settle", "settle"])


@settings(max_examples=120, deadline=None)
@given(st.lists(EVENTS, max_size=24), st.sampled_from([1, 2]), st.booleans())
def test_any_order_of_events_leaves_nothing_behind(events: list[str], size: int, stubborn: bool) -> None:
    asyncio.run(run_events(events, size, stubborn))


async def run_events(events: list[str], size: int, stubborn: bool) -> None:
    shop = Workshop()
    shop.made_engine.close_fails = stubborn
    epoch = MemberEpoch(Plan(size), shop)
    gateways: list[Gateway] = []
    ended_at: int | None = None
    epoch.prepare()
    for event in events:
        await happen(event, epoch, shop, gateways)
        if epoch.phase is Phase.ENDED and ended_at is None:
            ended_at = len(shop.reports)
    was_over = epoch.phase is Phase.ENDED
    epoch.fault(EpochEnded("the test is over"))
    epoch.fault(EpochEnded("and over"))
    assert shop.reports.count("fault") <= 1
    assert was_over or shop.reports[-1] == "fault"
    if ended_at is not None:
        assert len(shop.reports) == ended_at, "something was said after the end"
    assert all(len(gateway.problems) <= 1 for gateway in gateways)
    await epoch.closed()
    assert epoch.phase is Phase.ENDED
    assert shop.released == 1
    log = shop.made_engine.log
    assert log.count("close") == log.count("open")
    assert ("kill" in log) == (stubborn and "open" in log)
    if shop.made_carrier is not None:
        assert shop.made_carrier.log.count("stop") == 1
    for channel in shop.channels:
        with pytest.raises(OSError):
            channel.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def happen(event: str, epoch: MemberEpoch, shop: Workshop, gateways: list[Gateway]) -> None:
    if event.endswith(" fails"):
        shop.open(event.removesuffix(" fails"), EpochEnded("it failed"))
    elif event in (*GATES, "rotation"):
        shop.open(event)
    elif event == "commit":
        epoch.commit()
    elif event == "carrier_fault" and shop.on_fault is not None:
        shop.on_fault(EpochEnded("carrier"))
    elif event == "engine fault":
        epoch.engine_fault(EpochEnded("engine"))
    elif event == "end":
        epoch.end("test")
    elif event == "attach" and epoch.phase is Phase.UP and epoch.gateway is None:
        gateways.append(Gateway())
        epoch.attach(gateways[-1])
    elif event == "detach" and gateways:
        epoch.detach(gateways[-1])
    elif event == "settle":
        await settle()
