"""The product's engine, paced: `python engine.py ARGUMENTS --pace JSON`, started by `bench.paced.node` alone.

It computes a tiny model as the product does. Wherever the product waits for results, it waits until the named
Mac would have had them. So everything that the product times at load or while it serves is that Mac's time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # Python's -P leaves it out

import mlx.core as mx

from bench.paced.figures import Link, StageTime, figures
from bench.paced.node import Pace
from bench.paced.pacing import PacedDevice, PacedLink
from bench.paced.processor import BusyDevice, native_seconds
from bench.paced.timed import StepTable, StepTimes
from sealring.node.engine import caches, device, main, transfer
from sealring.node.engine import device as engine_device
from sealring.node.engine.caches import parts_of
from sealring.node.engine.staging import Stage, StageSpec
from sealring.node.engine.staging.mrope import Positions
from sealring.node.engine.staging.mtp_head import MtpHead
from sealring.node.wire.channel import EngineChannel, RecordHeader

_TOKEN_BYTES, _NUMBER_BYTES = 4, 2
_REPORT_SECONDS = 0.25


@dataclass
class Cost:
    """Seconds since the engine's start: the paced device's work, this process's own processor time, and how
    much later than paced results were handed over."""

    busy: float = 0.0
    own: float = 0.0
    late: float = 0.0
    steps: int = 0


class Hooked:
    """What stands between the product and MLX in this process."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._eval, self._async_eval, self._call = mx.eval, mx.async_eval, Stage.__call__
        self._report = Path(pace.reports) / f"{os.getpid()}.json"
        self._reported = 0.0

    def install(self) -> None:
        """Has the product call this object."""
        mx.eval, mx.async_eval = self.eval, self.async_eval
        Stage.__call__ = lambda stage, *arguments: self.call(stage, *arguments)  # type: ignore[method-assign]
        fill, guess = MtpHead.fill, MtpHead.__call__
        guesses: list[bool] = []

        def filled(head: MtpHead, tokens: mx.array, hidden: mx.array, cache: caches.Cache) -> mx.array:
            self.guessed(tokens.shape[1], tokens_in(cache), fills=not guesses)
            return fill(head, tokens, hidden, cache)

        def called(
            head: MtpHead, tokens: mx.array, hidden: mx.array, cache: caches.Cache
        ) -> tuple[mx.array, mx.array]:
            guesses.append(True)
            try:
                return guess(head, tokens, hidden, cache)
            finally:
                guesses.clear()

        MtpHead.fill, MtpHead.__call__ = filled, called  # type: ignore[method-assign]
        device.register(HookedDevice(self))

    def call(
        self, stage: Stage, inputs: list[mx.array], cache: caches.Batch, positions: Positions | None = None
    ) -> list[mx.array]:
        """The stage's call, as the product makes it."""
        rows, tokens = inputs[0].shape[:2]
        context = tokens_in(cache)
        outputs = self._call(stage, inputs, cache, positions)
        self.built(stage.spec, rows, tokens, context)
        return outputs

    def async_eval(self, *arrays: Any) -> None:
        begun, launched = time.perf_counter(), self.launch()
        self._async_eval(*arrays)
        self.held(launched, begun)

    def eval(self, *arrays: Any) -> None:
        launched = self.launch()
        self._eval(*arrays)
        self.done(launched, 0.0)

    def built(self, spec: StageSpec, rows: int, tokens: int, context: int) -> None:
        """Notes a step whose graph is complete."""
        raise NotImplementedError

    def guessed(self, tokens: int, context: int, *, fills: bool) -> None:
        """Notes a step of the tail's MTP head, which with `fills` makes no logits."""

    def launch(self) -> Any:
        """Notes that what was built is launched; what `done` gets."""
        raise NotImplementedError

    def held(self, launched: Any, begun: float) -> None:
        """Called by the thread that began a launch then, when it can go on."""

    def done(self, launched: Any, size: float) -> None:
        """Called when a launch has results of `size` bytes; 0 if they stay on this machine."""
        raise NotImplementedError

    def size_of(self, arrays: Sequence[mx.array]) -> float:
        """Bytes of the record of `arrays`."""
        return float(sum(array.nbytes for array in arrays))

    def report(self, made: Callable[[], dict[str, Any]]) -> None:
        """Writes what `made` makes, every now and then."""
        now = time.perf_counter()
        if now < self._reported + _REPORT_SECONDS:
            return
        self._reported = now
        beside = self._report.with_suffix(".new")
        beside.write_text(json.dumps(made()))
        beside.rename(self._report)


Launched = tuple[PacedDevice | BusyDevice, float]


class PacedEngine(Hooked):
    """Results are ready when the pace says so."""

    def __init__(self, pace: Pace, device: PacedDevice | BusyDevice | None = None) -> None:
        super().__init__(pace)
        known = figures()
        self._model = known.models.get(pace.model)
        self._completion = known.completion * pace.slower if self._model else 0.0
        self._tables = {place: StepTable.of(plain) for place, plain in pace.tables.items()}
        self._held = max((one.held for one in self._tables.values()), default=0.0)
        self._device: PacedDevice | BusyDevice = device or PacedDevice()
        self._core = (
            BusyDevice() if self._tables else None
        )  # the device from the first step that is served on
        self._native = self._step = 0.0
        self._layers = 1
        self._hop = self._paced(known.links[pace.link]) if self._model else None
        self._on_its_way = (0.0, 0.0)
        self._cost = Cost()

    def _paced(self, link: Link) -> PacedLink:
        seconds = link.wakeups + (0.0 if self.pace.shaped else link.seconds)
        return PacedLink(seconds * self.pace.slower, link.bytes_per_second / self.pace.slower)

    def install(self) -> None:
        super().install()
        if self._model is not None:  # a Mac has a GPU
            mx.fast.scaled_dot_product_attention = looked_at_nothing
            engine_device.rows_in_turn = lambda: False
            engine_device.metal = lambda: True
            send = EngineChannel.send

            def sent(channel: EngineChannel, header: RecordHeader, *parts: memoryview) -> None:
                self.carry()
                send(channel, header, *parts)

            EngineChannel.send = sent  # type: ignore[method-assign]

    def built(self, spec: StageSpec, rows: int, tokens: int, context: int) -> None:
        seconds = self._times(spec).step(rows, tokens, context) * self.pace.slower
        self._layers = spec.layers
        if self._device is self._core:  # the tiny computation is a part of the step
            spent = native_seconds()
            seconds, self._native = seconds - (spent - (self._native or spent)), spent
        self._step = max(0.0, seconds)
        self._device.build(seconds)

    def guessed(self, tokens: int, context: int, *, fills: bool) -> None:
        if self._model is not None:
            machine = figures().machines[self.pace.machine]
            one = StageTime(machine, self._model, 1 / self._model.layers, not fills)
            self._device.build(one.step(1, tokens, context) * self.pace.slower)

    def _times(self, spec: StageSpec) -> StageTime | StepTable:
        share = (spec.hi - spec.lo) / spec.layers
        if self._model is not None:
            drafts = self.pace.draft and spec.is_head and spec.is_tail
            model = figures().models[self.pace.draft] if drafts else self._model
            return StageTime(figures().machines[self.pace.machine], model, share, spec.is_tail)
        return self._tables[place_of(spec)]

    def launch(self) -> Launched:
        """The device, and the moment at which all that was built until now is done."""
        if self._device is self._core:
            return self._core, self._core.launch(self._held)
        return self._device, self._device.launch()

    def held(self, launched: Launched, begun: float) -> None:
        """Keeps the thread for the part of the step for which the recorded launches did."""
        device, moment = launched
        if device is self._core:
            device.wait(moment - (1 - self._held) * self._step)

    def done(self, launched: Launched, size: float) -> None:
        device, moment = launched
        late = device.wait(moment + self._completion)
        if self._core is not None and self._device is not self._core and serves():
            self._device = self._core
            for table in self._tables.values():
                table.serves = True
        if size and (serves() or not self.pace.draft):  # a draft model's guesses stay on this machine
            self._on_its_way = moment + self._completion, size
            self._cost.late += late
            self._cost.steps += 1
            self.report(self._costs)

    def carry(self) -> None:
        """Waits as long as the record of the last results is on its way. The thread that sends calls it."""
        (ready, size), self._on_its_way = self._on_its_way, (0.0, 0.0)
        if size and self._hop is not None:
            self._cost.late += self._device.wait(self._hop.arrival(ready, size))

    def _costs(self) -> dict[str, Any]:
        self._cost.busy, self._cost.own = self._device.busy, time.process_time()
        return asdict(self._cost)

    def size_of(self, arrays: Sequence[mx.array]) -> float:
        """Bytes of a record that the real model would send instead of `arrays`."""
        shape = arrays[0].shape
        if self._model is not None and arrays[0].dtype == mx.uint8:  # caches of doubled layers: keys, values
            doubled = len(arrays) / 2 / self._layers * self._model.layers
            return doubled * (self._model.kv_bytes * shape[2] + self._model.state_bytes)
        if len(shape) < 3 or self._model is None:  # tokens
            return float(_TOKEN_BYTES * arrays[0].size)
        return float(_NUMBER_BYTES * self._model.hidden * shape[0] * shape[1])


@dataclass
class Launch:
    """Work of the real device: rows, tokens and context of its steps, and when it was launched."""

    at: float
    steps: list[tuple[int, int, int]]
    held: float = 0.0


class Recorder(Hooked):
    """Nothing is paced; the times of all steps are measured, for a paced engine to take."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace)
        self._built: list[tuple[int, int, int]] = []
        self._place = ""
        self._launched = Launch(0.0, [])
        self._ready = self._spent = 0.0
        self._times = StepTimes()

    def built(self, spec: StageSpec, rows: int, tokens: int, context: int) -> None:
        self._place = place_of(spec)
        self._built.append((rows, tokens, context))

    def launch(self) -> Launch:
        """What was built until now, or with nothing new the last launch."""
        if self._built:
            self._launched, self._built = Launch(time.perf_counter(), self._built), []
        return self._launched

    def held(self, launched: Launch, begun: float) -> None:
        launched.held += time.perf_counter() - begun

    def done(self, launched: Launch, size: float) -> None:
        now, steps = time.perf_counter(), launched.steps
        if steps:
            spent = native_seconds()
            took, self._spent = spent - self._spent, spent
            held = launched.held / max(1e-6, now - max(launched.at, self._ready))
            if serves():
                self._times.add(*steps[-1], took, took * min(1.0, held))
            else:
                self._times.load(*steps[-1], now - max(launched.at, self._ready))
            steps.clear()
            self._ready = now
            self.report(lambda: {"place": self._place, **self._times.plain()})


def looked_at_nothing(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
    """Instead of attention, which over 50,000 tokens is most of what the tiny model costs: the queries, once
    the caches are there."""
    return queries + 0 * (keys[:, :, -1:] + values[:, :, -1:])


def serves() -> bool:
    """Whether an epoch's outbox waits for results, and no stage that is timed at load."""
    return threading.current_thread() is not threading.main_thread()


def place_of(spec: StageSpec) -> str:
    """The key of a stage's table."""
    return "head" if spec.is_head else "tail"


class HookedDevice(device.Accelerator):
    """A device whose results the hooks hear of. Prefixes are not stored."""

    shares_memory = False

    def __init__(self, hooks: Hooked) -> None:
        self._hooks = hooks

    def transfer(self) -> HookedTransfer:
        return HookedTransfer(self._hooks)


class HookedTransfer(transfer.SharedTransfer):
    """Transfer of results that the hooks hear of."""

    def __init__(self, hooks: Hooked) -> None:
        self._hooks = hooks

    def send_buffer(self, arrays: Sequence[mx.array]) -> transfer.SendBuffer:
        return HookedSendBuffer(arrays, self._hooks)


class HookedSendBuffer(transfer.SharedSendBuffer):
    """Results of one launch."""

    def __init__(self, arrays: Sequence[mx.array], hooks: Hooked) -> None:
        super().__init__(arrays)
        self._hooks = hooks
        self._size = hooks.size_of(arrays)
        self._launched: Any = None

    @property
    def pending(self) -> list[mx.array]:
        self._launched = self._hooks.launch()
        return super().pending

    def wait(self) -> list[memoryview]:
        found = super().wait()
        self._hooks.done(self._launched, self._size)
        return found


def tokens_in(cache: caches.Batch) -> int:
    """Tokens that the caches of a step hold; of rows together, with what they are padded by."""
    most = 0
    for entry in cache:
        for part in parts_of(entry):
            found = getattr(part, "_idx", None) or getattr(part, "offset", 0)
            if isinstance(found, int):
                most = max(most, found)
    return most


def run() -> None:
    """Takes --pace out of the command line; the rest is the engine's."""
    place = sys.argv.index("--pace")
    pace = Pace(**json.loads(sys.argv[place + 1]))
    del sys.argv[place : place + 2]
    (Recorder if pace.records else PacedEngine)(pace).install()
    main.main()


if __name__ == "__main__":
    run()
