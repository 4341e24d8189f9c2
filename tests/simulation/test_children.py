"""Rings of real engine and carrier processes' parents over doubles of the processes, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from children import Children
from commands import quickly
from simulatedmodel import SimulatedModel
from wires import Wires

from sealring.mesh.crypto.suites import DEFAULT_SUITES
from sealring.mesh.errors import SealringError
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
    """Latency, and hosts that are cut off."""

    def __init__(self) -> None:
        self.cut: set[str] = set()

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        if not {source, target} & self.cut:
            asyncio.get_running_loop().call_later(0.001, deliver)


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

    def engine_fault(self, error: SealringError) -> None:
        self.faults.append(error)
        self.ring.changed.set()

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
                self.texts[output.row] = self.texts.get(output.row, "") + output.text
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
        self.salt = random.randbytes(32)  # sessions are used once in a process
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
        for rank in range(self.size) if ranks is None else ranks:
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

    async def answer(self, row: int, text: str, max_tokens: int = 0) -> tuple[str, int]:
        await self.prefill(await self.opened(row, text, max_tokens))
        await self.decode(row)
        return self.texts[row], self.outputs[row].tokens


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
        async def whole() -> None:
            async with ring_of(size, tmp_path, **options) as ring:
                await play(ring)

        quickly(whole())

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
