"""Rings of real engine and carrier processes' parents over doubles of the processes, in virtual time."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from children import Children, LoadFault
from commands import quickly
from simulatedmodel import SimulatedModel
from wires import Wires

from sealring.mesh.clock import MachineClocks, machine_clocks
from sealring.mesh.crypto import DEFAULT_SUITES
from sealring.mesh.errors import EpochEnded, ResourceExhausted, SealringError, StageFailed
from sealring.node.carrier.neighbours import PASS_BYTES
from sealring.node.daemon.carrier_process import CarrierProcess
from sealring.node.daemon.engine_process import EngineProcess, StageKey
from sealring.node.daemon.link_setup import listen_for_neighbour
from sealring.node.link.keys import LinkContext, SessionKeys
from sealring.node.wire.channel import create_channel
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

RING = "simulated-0"
CHUNK, ROWS = 16, 8
MODEL = SimulatedModel()


class Network:
    """Latency, which changes the order, and hosts that are cut off."""

    def __init__(self) -> None:
        self.cut: set[str] = set()
        self._random = random.Random(11)

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        if not {source, target} & self.cut:
            asyncio.get_running_loop().call_later(self._random.uniform(0.0002, 0.003), deliver)


class Member:
    """A member of a ring, without a daemon: a real engine, a real carrier, and what they say."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.rank = ring, rank
        self.children = Children(
            f"host-{rank}", ring.wires, [MODEL], memory=ring.memory, rekey_records=ring.rekey_records
        )
        self.engine: Any = None
        self.carrier: Any = None
        self.listener: Any = None
        self.faults: list[SealringError] = []
        self.ended = asyncio.Event()

    async def start(self) -> None:
        size = self.ring.size
        edges = [MODEL.layers * rank // size for rank in range(size + 1)]
        stage = StageKey(
            f"/models/{MODEL.name}",
            MODEL.digest,
            *edges[self.rank : self.rank + 2],
            MODEL.context,
            0,
            CHUNK,
            ROWS,
        )
        self.engine = await EngineProcess.start(on_end=lambda _: self.ended.set(), spawn=self.children.spawn)
        await self.engine.load(stage, lambda _: None)

    async def open(self, epoch: int) -> engine.EpochOpened:
        command = engine.OpenEngineEpoch(
            epoch=epoch,
            rank=self.rank,
            size=self.ring.size,
            prefill_chunk=CHUNK,
            max_rows=ROWS,
            kv_budget=1 << 20,
            ring=RING,
            speculate=True,
        )
        if self.ring.size == 1:
            return await self.engine.open_epoch(command, (), self)
        ends = create_channel()
        self.listener, self.address = listen_for_neighbour("127.0.0.1", everywhere=False)
        self.carrier = await CarrierProcess.start(
            ends.carrier,
            self.listener,
            folder=self.ring.folder,
            on_fault=self.engine_fault,
            spawn=self.children.spawn,
        )
        self.listener.close()
        opened = await self.engine.open_epoch(command, ends.engine, self)
        ends.close()
        return opened

    # As the sink of its engine

    def row_event(self, event: bytes) -> None:
        self.ring.hear(engine.EngineEvent.FromString(event))

    def row_digests(self, digests: engine.RowDigests) -> None:
        self.ring.digests.append((self.rank, digests))
        self.ring.changed.set()

    def engine_fault(self, error: SealringError) -> None:
        self.faults.append(error)
        self.ring.changed.set()

    async def close(self) -> None:
        """Ends the epoch, as a daemon does."""
        await self.carrier.stop()
        await self.engine.close_epoch()
        self.faults.clear()

    async def lose_power(self) -> None:
        self.children.power_off()
        await self.stop()

    async def stop(self) -> None:
        for part in (self.carrier, self.engine):
            if part is not None:
                await part.stop()


class Ring:
    """Members, and a gateway that is as simple as possible: one lane, one chunk a step."""

    def __init__(
        self, size: int, folder: Path, *, memory: int = 1 << 34, rekey_records: int = 1 << 30
    ) -> None:
        self.size, self.folder, self.memory, self.rekey_records = size, folder, memory, rekey_records
        self.network = Network()
        self.wires = Wires(self.network.send, random.Random(7))
        self.members = [Member(self, rank) for rank in range(size)]
        self.events: list[engine.EngineEvent] = []
        self.digests: list[tuple[int, engine.RowDigests]] = []
        self.changed = asyncio.Event()
        self.texts: dict[int, str] = {}
        self.outputs: dict[int, control.RowOutput] = {}
        self.done = self.steps = 0
        self.epoch = 0

    def hear(self, event: engine.EngineEvent) -> None:
        self.events.append(event)
        if event.HasField("done"):
            self.done = event.done.step
            for output in event.done.outputs:
                self.texts[output.row] = self.texts.get(output.row, "") + output.delta.text
                self.outputs[output.row] = output
        self.changed.set()

    def keys(self, epoch: int, generation: int = 0, *, wrong: int = -1) -> list[tuple[bytes, bytes]]:
        """For each link the keys of its two ends; those of the link `wrong` do not match."""
        found = []
        for rank in range(self.size):
            after = (rank + 1) % self.size
            ends = []
            for own in (rank, after):
                context = LinkContext("c", RING, epoch, rank, after, own, 1, bytes(32))
                secret = random.Random(f"{epoch} {generation} {rank} {own if rank == wrong else 0}")
                keys = SessionKeys.derive(DEFAULT_SUITES[0], context, secret.randbytes(32), self.salt)
                ends.append(keys.to_carrier())
            found.append((ends[0], ends[1]))
        return found

    async def form(self, epoch: int = 1, *, wrong: int = -1) -> list[engine.EpochOpened]:
        self.epoch, self.steps, self.done = epoch, 0, 0
        self.salt = secrets.token_bytes(32)  # sessions are used once in a process
        opened = [await member.open(epoch) for member in self.members]
        if self.size > 1:
            keys = self.keys(epoch, wrong=wrong)
            for rank, member in enumerate(self.members):
                before = (rank - 1) % self.size
                start = engine.StartCarrier(
                    rank=rank,
                    size=self.size,
                    next_address=self.members[(rank + 1) % self.size].address,
                    outgoing_keys=keys[rank][0],
                    incoming_keys=keys[before][1],
                    outgoing_pass=bytes([rank]) * PASS_BYTES,
                    incoming_pass=bytes([before]) * PASS_BYTES,
                    form_timeout_ms=20_000,
                )
                member.carrier.give(start)
            await asyncio.gather(*(member.carrier.form(20.0) for member in self.members))
        return opened

    def work(self, command: engine.EngineCommand, ranks: Any = None) -> None:
        """Gives a command to the engines that are there."""
        for rank in range(self.size) if ranks is None else ranks:
            if self.members[rank].engine.alive:
                self.members[rank].engine.send_work(command.SerializeToString())

    def step(self, *changes: control.Change, **work: Any) -> int:
        self.steps += 1
        step = control.Step(number=self.steps, changes=changes, **work)
        self.work(engine.EngineCommand(step=step))
        return self.steps

    async def until(self, check: Callable[[], object]) -> None:
        async with asyncio.timeout(600):
            while not check():
                if faults := [one for member in self.members for one in member.faults]:
                    raise faults[0]
                self.changed.clear()
                await self.changed.wait()

    async def opened(self, row: int, text: str, max_tokens: int = 0, **more: Any) -> control.RowOpened:
        resume = more.pop("resume", None)
        prompt = inference.Prompt(text=text, resume=resume)
        asked = engine.OpenEngineRow(
            row=row, prompt=prompt, max_tokens=max_tokens, prefix_scope=b"ctenant", **more
        )
        self.work(engine.EngineCommand(open_row=asked), [0])
        await self.until(lambda: self.events and _row_of(self.events[-1]) == row)
        event = self.events[-1]
        assert event.HasField("opened"), event
        return event.opened

    def chunk(self, opened: control.RowOpened, start: int, **more: Any) -> control.Chunk:
        end = min(opened.prompt_tokens, start + CHUNK)
        params = opened.params_bytes if start == 0 or more else 0
        return control.Chunk(
            row=opened.row,
            start=start,
            end=end,
            prompt_tokens=opened.prompt_tokens,
            params_bytes=params,
            **more,
        )

    async def prefill(self, opened: control.RowOpened, first: int = 0, **more: Any) -> None:
        number = 0
        for start in range(first, opened.prompt_tokens, CHUNK):
            chunk = self.chunk(opened, start, **(more if start == first else {}))
            number = self.step(prefill=control.Prefill(chunks=[chunk]))
        await self.until(lambda: self.done >= number)

    async def decode(self, *rows: int) -> None:
        """Steps the rows in one lane until all have ended, and evicts them."""
        changes = [control.Change(admit=control.Admit(row=row, lane=0)) for row in rows]
        while not all(self.outputs[row].finish for row in rows):
            number = self.step(*changes, decode=control.Decode(lane=0))
            changes = []
            await self.until(lambda: self.done >= number)  # noqa: B023
        number = self.step(*changes, *(control.Change(evict=control.Evict(row=row)) for row in rows))
        await self.until(lambda: self.done >= number)

    async def draft(self, row: int, opened: control.RowOpened, runs: int, drafts: int) -> None:
        """As `decode`, with `runs` runs of drafts under way at once."""
        changes = [control.Change(admit=control.Admit(row=row, lane=0))]
        while not self.outputs[row].finish:
            for _ in range(runs):
                work = control.Decode(lane=0, drafts=drafts, asks=True, source=control.DRAFT_SOURCE_LOOKUP)
                number = self.step(*changes, decode=work)
                changes = []
            await self.until(lambda: self.done >= number)  # noqa: B023
            tokens = opened.prompt_tokens + self.outputs[row].delta.tokens - 1
            changes = [control.Change(settle=control.Settle(row=row, tokens=tokens))]
        number = self.step(*changes, control.Change(evict=control.Evict(row=row)))
        await self.until(lambda: self.done >= number)

    async def answer(self, row: int, text: str, max_tokens: int = 0) -> tuple[str, int]:
        await self.prefill(await self.opened(row, text, max_tokens))
        await self.decode(row)
        return self.texts[row], self.outputs[row].delta.tokens


def _row_of(event: engine.EngineEvent) -> int:
    return int(event.opened.row or event.refused.row)


@asynccontextmanager
async def ring_of(size: int, folder: Path, **options: Any) -> AsyncIterator[Ring]:
    ring = Ring(size, folder, **options)
    try:
        await asyncio.gather(*(member.start() for member in ring.members))
        yield ring
    finally:
        await asyncio.gather(*(member.stop() for member in ring.members))


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., None]:
    def run(size: int, play: Callable[[Ring], Coroutine[Any, Any, None]], **options: Any) -> None:
        errors: list[Any] = []

        async def whole() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: errors.append(context))
            machine_clocks.set(MachineClocks.of(loop.time, loop.time, loop.time))
            async with ring_of(size, tmp_path, **options) as ring:
                await play(ring)

        quickly(whole())
        assert errors == []

    return run


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_are_those_of_the_model(simulated: Any, size: int) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        long = " ".join(f"word{number}" for number in range(40))
        for row, (text, most) in enumerate((("hello there", 0), (long, 0), ("say:30 please", 9)), 1):
            assert await ring.answer(row, text, most) == MODEL.answer(text, 0, most)
        assert [(one.steps, one.rows, one.kv_bytes) for one in ring.wires.served] == [
            (ring.steps, 0, 0)
        ] * size
        assert ring.wires.broken == []

    simulated(size, play)


LONG = " ".join(f"word{number}" for number in range(70))


def test_rows_of_one_lane_join_and_leave(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        texts = {1: "say:12 one", 2: "say:3 two", 3: "say:5 three"}
        for row, text in texts.items():
            await ring.prefill(await ring.opened(row, text))
        await ring.decode(*texts)
        assert ring.texts == {row: MODEL.answer(text)[0] for row, text in texts.items()}
        assert ring.wires.broken == []

    simulated(2, play)


def test_choices_are_copies_with_answers_of_their_own(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        opened = await ring.opened(1, LONG, choices=3)
        await ring.prefill(opened, choices=3)
        await ring.decode(1, 2, 3)
        assert ring.texts == {1 + choice: MODEL.answer(LONG, choice)[0] for choice in range(3)}
        assert len(set(ring.texts.values())) == 3
        assert ring.wires.broken == []

    simulated(3, play)


def test_an_answer_goes_on_in_the_next_epoch_and_begins_with_what_was_kept(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        opened = await ring.opened(1, LONG)
        number = 0
        for start in range(0, 64, CHUNK):
            number = ring.step(prefill=control.Prefill(chunks=[ring.chunk(opened, start)]))
        keep = control.Change(keep=control.Keep(prefix=1, row=1, tokens=64))
        ring.step(keep, prefill=control.Prefill(chunks=[ring.chunk(opened, 64)]))
        await ring.until(lambda: ring.done > number)
        first = ring.outputs[1]
        for member in ring.members:
            await member.close()
        assert [one.rows for one in ring.wires.served] == [0, 0]

        kept = [each.kept for each in await ring.form(2)]
        origin = (1, 1, 64)
        assert [[(one.epoch, one.row, one.tokens) for one in each] for each in kept] == [[origin]] * 2
        opened = await ring.opened(1, LONG, resume=inference.Resume(tokens=[first.token]))
        assert (opened.answered, opened.prompt_tokens) == (1, 71)
        adopt = control.Change(adopt=control.Adopt(prefix=1, epoch=1, row=1, tokens=64))
        chunk = ring.chunk(opened, 64, prefix=1, takes=True)
        ring.step(adopt, prefill=control.Prefill(chunks=[chunk]))
        await ring.until(lambda: ring.done == 1)
        await ring.decode(1)
        assert (ring.texts[1], ring.outputs[1].delta.tokens) == MODEL.answer(LONG)
        assert [one.kv_bytes for one in ring.wires.served] == [0] * 4
        assert ring.wires.broken == []

    simulated(2, play)


def test_a_row_is_evicted_in_the_middle_of_its_prompt(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        opened = await ring.opened(1, LONG)
        for start in range(0, 48, CHUNK):
            ring.step(prefill=control.Prefill(chunks=[ring.chunk(opened, start)]))
        number = ring.step(control.Change(evict=control.Evict(row=1)))
        await ring.until(lambda: ring.done == number)
        assert await ring.answer(2, "hello") == MODEL.answer("hello")
        assert [(one.rows, one.kv_bytes) for one in ring.wires.served] == [(0, 0)] * 3
        assert ring.wires.broken == []

    simulated(3, play)


def test_what_the_head_does_not_take_is_refused(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        many = "word " * MODEL.context
        for row, text in enumerate((many, "", "gone"), 1):
            asked = engine.OpenEngineRow(row=row, prompt=inference.Prompt(text=text))
            ring.work(engine.EngineCommand(open_row=asked), [0])
        ring.work(engine.EngineCommand(discard=control.DiscardRow(row=3)), [0])
        await ring.until(lambda: len(ring.events) == 3)
        refused = {event.refused.row: event.refused.problem.reason for event in ring.events}
        assert refused == {1: "CONTEXT_TOO_LONG", 2: "EMPTY_PROMPT", 3: "DISCARDED"}
        assert ring.wires.broken == []

    simulated(1, play)


def test_head_and_tail_have_the_same_to_sign(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        await ring.prefill(await ring.opened(1, "say:4 all", receipt=bytes(range(32))))
        changes = [control.Change(admit=control.Admit(row=1, lane=0))]
        for _ in range(4):
            number = ring.step(*changes, decode=control.Decode(lane=0))
            changes = []
            await ring.until(lambda: ring.done == number)  # noqa: B023
        sign = engine.EngineCommand(sign=control.SignRow(row=1, tokens=5))
        ring.work(sign, [1])
        await ring.until(lambda: len(ring.digests) == 2)
        (_, head), (_, tail) = ring.digests
        assert head.sampled == tail.sampled != b""
        assert (head.tokens, head.finish) == (5, inference.FINISH_REASON_STOP)

    simulated(2, play)


def test_keys_are_renewed_while_steps_flow(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        await ring.answer(1, "say:20 please")
        carriers = [member.carrier for member in ring.members]
        for outgoing in (True, False):
            assert all(one.rekey_wanted(outgoing=outgoing).is_set() for one in carriers)
        for generation, at_step in ((1, ring.steps + 1), (2, ring.steps + 30)):
            keys = ring.keys(1, generation)
            for rank, carrier in enumerate(carriers):
                await carrier.install(keys[rank][0], outgoing=True, at_step=at_step)
                await carrier.install(keys[(rank - 1) % 3][1], outgoing=False, at_step=at_step)
        before = [await carrier.look() for carrier in carriers]
        assert await ring.answer(2, "say:40 please") == MODEL.answer("say:40 please")
        figures = [await carrier.look() for carrier in carriers]
        assert [one.sent for one in figures] == [figures[(rank + 1) % 3].received for rank in range(3)]
        assert all(now.sent > then.sent + 40 for then, now in zip(before, figures, strict=True))
        assert ring.wires.broken == []

    simulated(3, play, rekey_records=10)


def test_keys_that_do_not_match_are_seen(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        with pytest.raises(SealringError) as refused:
            await ring.form(wrong=1)
        assert refused.value.reason == "RECORD_REFUSED"
        assert ring.wires.broken == ["host-2 and host-1 have different keys for their link"]

    simulated(3, play)


def test_keys_that_change_at_different_steps_are_seen(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        keys = ring.keys(1, 1)
        await ring.members[0].carrier.install(keys[0][0], outgoing=True, at_step=1)
        await ring.members[1].carrier.install(keys[0][1], outgoing=False, at_step=2)
        with pytest.raises(SealringError, match="cannot be"):
            await ring.answer(1, "hello")
        (broken,) = ring.wires.broken
        assert broken.startswith("host-1 cannot open a record of step 1")

    simulated(2, play)


def test_members_that_disagree_about_a_step_are_seen(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        opened = await ring.opened(1, "one two three")
        for rank, end in ((0, 2), (1, 1)):
            chunk = ring.chunk(opened, 0)
            chunk.end = end
            step = control.Step(number=1, prefill=control.Prefill(chunks=[chunk]))
            ring.work(engine.EngineCommand(step=step), [rank])
        with pytest.raises(SealringError):
            await ring.until(lambda: False)
        assert any("cannot open a record of step 1" in one for one in ring.wires.broken)

    simulated(2, play)


@pytest.mark.parametrize("name", ["engine", "carrier"])
def test_a_child_that_is_killed_ends_the_epoch_of_all(simulated: Any, name: str) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        await ring.answer(1, "hello")
        (child,) = ring.members[1].children.named(name)
        child.crash()
        while not all(member.faults for member in ring.members):
            ring.changed.clear()
            await ring.changed.wait()
            for member in ring.members:
                if member.faults:
                    await member.carrier.stop()
        assert {one.reason for one in ring.members[1].faults} <= {"CHILD_ENDED", "EPOCH_ENDED"}
        assert ring.members[2].faults[0].reason == "PEER_LOST"
        assert ring.members[1].ended.is_set() == (name == "engine")
        assert ring.wires.broken == []

    simulated(3, play)


@pytest.mark.parametrize(("name", "reason"), [("engine", "ENGINE_FROZEN"), ("carrier", "CARRIER_FROZEN")])
def test_a_child_that_is_frozen_is_found(simulated: Any, name: str, reason: str) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        opened = await ring.opened(1, LONG)
        (child,) = ring.members[1].children.named(name)
        child.freeze()
        with pytest.raises(EpochEnded) as frozen:
            await ring.prefill(opened)
        assert frozen.value.reason == reason
        assert ring.wires.broken == []

    simulated(2, play)


def test_a_child_that_is_thawed_in_time_goes_on(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        children = [child for child in ring.members[1].children.alive if child.status is None]
        assert {child.name for child in children} == {"engine", "carrier"}
        for child in children:
            child.freeze()
        asyncio.get_running_loop().call_later(1.5, lambda: [child.thaw() for child in children])
        begun = asyncio.get_running_loop().time()
        assert await ring.answer(1, LONG) == MODEL.answer(LONG)
        assert asyncio.get_running_loop().time() - begun > 1.5
        assert ring.wires.broken == []

    simulated(2, play)


def test_a_short_partition_delays_and_a_long_one_resets_the_links(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        ring.network.cut.add("host-1")
        asyncio.get_running_loop().call_later(40.0, ring.network.cut.clear)
        begun = asyncio.get_running_loop().time()
        assert await ring.answer(1, LONG) == MODEL.answer(LONG)
        assert asyncio.get_running_loop().time() - begun > 40.0
        ring.network.cut.add("host-1")
        opened = await ring.opened(2, "hello")
        number = ring.step(prefill=control.Prefill(chunks=[ring.chunk(opened, 0)]))
        await asyncio.sleep(60)
        ahead = await ring.members[1].carrier.look()
        assert ahead.waiting_ms > 50_000
        with pytest.raises(SealringError):
            await ring.until(lambda: ring.done == number)
        assert ring.wires.broken == []

    simulated(2, play)


def test_a_machine_without_power_answers_nobody_and_may_come_back(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        await ring.answer(1, "hello")
        ring.network.cut.add("host-1")
        await ring.members[1].lose_power()
        assert ring.members[1].children.named("engine") == []
        opened = await ring.opened(2, "hello")
        ring.step(prefill=control.Prefill(chunks=[ring.chunk(opened, 0)]))
        await asyncio.sleep(10)
        assert ring.members[0].faults == []
        ring.network.cut.clear()  # its kernel knows nothing of the connection
        await asyncio.sleep(10)
        ring.step(control.Change(evict=control.Evict(row=2)))
        assert ring.members[0].children.named("carrier")
        await ring.members[0].close()
        await ring.members[1].start()
        await ring.form(2)
        assert await ring.answer(3, LONG) == MODEL.answer(LONG)
        assert ring.wires.broken == []

    simulated(2, play)


def test_loads_fail_take_long_and_are_killed(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        (member,) = ring.members
        loop = asyncio.get_running_loop()
        await member.stop()
        member.children.load = LoadFault(factor=50.0)
        begun = loop.time()
        await member.start()
        assert loop.time() - begun > 99.0
        full = ResourceExhausted("no memory", reason="OUT_OF_MEMORY")
        for fault, reason in (
            (LoadFault(error=full), "OUT_OF_MEMORY"),
            (LoadFault(killed=True), "CHILD_ENDED"),
        ):
            await member.stop()
            member.children.load = fault
            with pytest.raises(SealringError) as failed:
                await member.start()
            assert failed.value.reason == reason

    simulated(1, play)


def test_a_profile_is_the_models_and_a_tensor_ring_has_no_group(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        process = ring.members[0].engine
        assert await process.profile(f"/anywhere/{MODEL.name}") == MODEL.profile()
        with pytest.raises(SealringError, match="no such model"):
            await process.profile("/anywhere/other")
        with pytest.raises(SealringError) as refused:
            await process.join_group(engine.JoinGroup(), 5.0)
        assert refused.value.reason == EpochEnded.no_group

    simulated(1, play)


def test_epochs_that_fall_are_seen(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        for epoch in (2, 2):
            await ring.form(epoch)
            await ring.members[0].engine.close_epoch()
        assert ring.wires.broken == ["host-0 opens epoch 2 of simulated-0 after a later one"]

    simulated(1, play)


def test_children_end_with_their_daemon(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        ring.members[1].children.orphan()
        assert ring.members[1].children.named("engine") == []
        async with asyncio.timeout(600):
            with pytest.raises(SealringError, match="neighbour"):
                await _fault_of(ring, 2)
        assert ring.wires.broken == []

    simulated(3, play)


async def _fault_of(ring: Ring, rank: int) -> None:
    while not ring.members[rank].faults:
        ring.changed.clear()
        await ring.changed.wait()
    raise ring.members[rank].faults[0]


@pytest.mark.parametrize(("size", "runs", "drafts"), [(2, 1, 1), (2, 3, 4), (3, 2, 7)])
def test_drafts_change_no_answer(simulated: Any, size: int, runs: int, drafts: int) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        for row, (text, most) in enumerate((("say:40 please", 0), ("say:40 again", 17), (LONG, 0)), 1):
            opened = await ring.opened(row, text, most)
            await ring.prefill(opened)
            await ring.draft(row, opened, runs, drafts)
            assert (ring.texts[row], ring.outputs[row].delta.tokens) == MODEL.answer(text, 0, most)
        assert [(one.rows, one.kv_bytes) for one in ring.wires.served] == [(0, 0)] * size
        assert ring.steps < 3 * 40
        assert ring.wires.broken == []

    simulated(size, play)


def test_a_step_that_fails_ends_the_epoch(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        await ring.form()
        ring.members[1].children.step_error = StageFailed("reset", reason=StageFailed.gpu_reset)
        with pytest.raises(SealringError) as failed:
            await ring.answer(1, "hello")
        assert failed.value.reason == StageFailed.gpu_reset
        assert ring.wires.broken == []

    simulated(2, play)


def test_two_engines_that_fill_a_machine_twice_are_seen(simulated: Any) -> None:
    async def play(ring: Ring) -> None:
        (member,) = ring.members
        first = member.engine
        with pytest.raises(SealringError):
            await member.start()
        await first.stop()
        assert ring.wires.broken == ["host-0 is to load more than its memory holds"]

    simulated(1, play, memory=MODEL.stage_bytes(0, MODEL.layers) * 3 // 2)
