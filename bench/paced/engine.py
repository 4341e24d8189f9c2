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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # Python's -P leaves it out

import mlx.core as mx  # noqa: E402

from bench.paced.figures import Link, StageTime, figures  # noqa: E402
from bench.paced.node import Pace  # noqa: E402
from bench.paced.pacing import PacedDevice, PacedLink  # noqa: E402
from sealring.node.engine import device, main, transfer  # noqa: E402
from sealring.node.engine.staging import Stage, caches  # noqa: E402

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


class PacedEngine:
    """The pace of this process. `install` has the product's engine wait by it."""

    def __init__(self, pace: Pace) -> None:
        known = figures()
        self._pace = pace
        self._machine, self._model = known.machines[pace.machine], known.models[pace.model]
        self._completion = known.completion * pace.slower
        link = known.links[pace.link]
        self._hop = self._paced(link)
        self._device = PacedDevice()
        self._eval, self._async_eval, self._call = mx.eval, mx.async_eval, Stage.__call__
        self._cost = Cost()
        self._reported = 0.0
        self._report = Path(pace.reports) / f"{os.getpid()}.json"

    def _paced(self, link: Link) -> PacedLink:
        seconds = link.wakeups + (0.0 if self._pace.shaped else link.seconds)
        return PacedLink(seconds * self._pace.slower, link.bytes_per_second / self._pace.slower)

    def install(self) -> None:
        """Puts the pace between the product and MLX."""
        mx.eval, mx.async_eval = self.eval, self.async_eval
        Stage.__call__ = lambda stage, inputs, cache: self.call(stage, inputs, cache)  # type: ignore[method-assign]
        device.rows_in_turn = lambda: False
        transfer.register(lambda: PacedTransfer(self))

    def call(self, stage: Stage, inputs: list[mx.array], cache: caches.Batch) -> list[mx.array]:
        """The stage's call; its step's time is what the next launch takes."""
        spec = stage.spec
        rows, tokens = inputs[0].shape[:2]
        context = held(cache)
        outputs = self._call(stage, inputs, cache)
        timed = StageTime(self._machine, self._model, (spec.hi - spec.lo) / spec.layers, spec.is_tail)
        self._device.build(timed.step(rows, tokens, context) * self._pace.slower)
        return outputs

    def launch(self) -> float:
        """The moment at which all that was built until now is done."""
        return self._device.launch()

    def async_eval(self, *arrays: Any) -> None:
        self._async_eval(*arrays)
        self._device.launch()

    def eval(self, *arrays: Any) -> None:
        ready = self._device.launch()
        self._eval(*arrays)
        self._device.wait(ready + self._completion)

    def deliver(self, ready: float, size: float) -> None:
        """Waits until results of `size` bytes, ready at `ready`, are with whoever they are for."""
        until = ready + self._completion
        if threading.current_thread() is not threading.main_thread():  # which only warms up
            until = self._hop.arrival(until, size) if size else until
        self._cost.late += self._device.wait(until)
        self._cost.steps += 1
        self._write(time.perf_counter())

    def _write(self, now: float) -> None:
        if now < self._reported + _REPORT_SECONDS:
            return
        self._reported = now
        self._cost.busy, self._cost.own = self._device.busy, time.process_time()
        beside = self._report.with_suffix(".new")
        beside.write_text(json.dumps(asdict(self._cost) | {"machine": self._pace.machine}))
        beside.rename(self._report)

    def size_of(self, arrays: Sequence[mx.array]) -> float:
        """Bytes of a record that the real model would send instead of `arrays`."""
        shape = arrays[0].shape
        if len(shape) < 3:  # tokens
            return float(_TOKEN_BYTES * arrays[0].size)
        return float(_NUMBER_BYTES * self._model.hidden * shape[0] * shape[1])


class PacedTransfer(transfer.SharedTransfer):
    """Transfer of results that arrive when the paced device and link have brought them."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine

    def send_buffer(self, arrays: Sequence[mx.array]) -> transfer.SendBuffer:
        return PacedSendBuffer(arrays, self._engine)


class PacedSendBuffer(transfer.SharedSendBuffer):
    """Results of a paced launch."""

    def __init__(self, arrays: Sequence[mx.array], engine: PacedEngine) -> None:
        super().__init__(arrays)
        self._engine = engine
        self._size = engine.size_of(arrays)
        self._ready = 0.0

    @property
    def pending(self) -> list[mx.array]:
        self._ready = self._engine.launch()
        return super().pending

    def wait(self) -> list[memoryview]:
        found = super().wait()
        self._engine.deliver(self._ready, self._size)
        return found


def held(cache: caches.Batch) -> int:
    """Tokens that the caches of a step hold; of rows together, with what they are padded by."""
    most = 0
    for entry in cache:
        for part in caches.parts_of(entry):
            found = getattr(part, "_idx", None) or getattr(part, "offset", 0)
            if isinstance(found, int):
                most = max(most, found)
    return most


def run() -> None:
    """Takes --pace out of the command line; the rest is the engine's."""
    place = sys.argv.index("--pace")
    pace = Pace(**json.loads(sys.argv[place + 1]))
    del sys.argv[place : place + 2]
    PacedEngine(pace).install()
    main.main()


if __name__ == "__main__":
    run()
