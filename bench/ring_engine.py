"""One engine of `bench.ring`: the product's engine process with random weights and a front without text.

    python -m bench.ring_engine --control-fd N --handoff-fd M --config JSON --lo A --hi B --traces FOLDER

At the end of an epoch it writes its step times, and at the head the tokens, to FOLDER/EPOCH-LO.json.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from bench.models import drawn_prompt
from sealring.mesh.ring import Change, Chunk, ResolvedStep
from sealring.mesh.system import logging
from sealring.node.engine import Asking, TokenLogprobs, device, nvidia, params
from sealring.node.engine.drafts.source import Source
from sealring.node.engine.folder import Loaded
from sealring.node.engine.main import _SWITCH_SECONDS, Engine
from sealring.node.engine.prefixes import Origin
from sealring.node.engine.staging import random_stage
from sealring.node.engine.warm_up import warm_up
from sealring.node.wire.frames import FrameSocket
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

PARAMETERS = params.encode(params.RowParameters())


class Front:
    """As node.engine.text.front.Front with its parts, for prompts that are drawn here; texts are empty."""

    stuck = False

    def __init__(self, emit: Callable[[engine.EngineEvent], None], vocabulary: int) -> None:
        self._emit = emit
        self._vocabulary = vocabulary
        self._opened: dict[int, tuple[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.book = self.reader = self

    def open(self, chunk: control.Chunk) -> None:
        """A row begins. Rows that are copies of each other have the prompt of row 1."""
        self._opened[chunk.row] = (1 if chunk.choices else chunk.row, chunk.prompt_tokens)

    def prompt(self, row: int) -> Any:
        return np.array(drawn_prompt(*self._opened[row], self._vocabulary), np.uint32)

    def parameters(self, row: int) -> bytes:
        return PARAMETERS

    def prefilled(self, row: int) -> None:
        del self._opened[row]

    def begin(self, chunk: Chunk) -> None: ...

    def change(self, change: Change) -> None: ...

    def close_rows(self) -> None: ...

    def begin_epoch(
        self,
        origins: Mapping[Origin, Sequence[int]],
        *,
        sources: Collection[Source],
        tail_reads: bool,
        sealed: bool,
        longest: int,
    ) -> dict[Origin, tuple[bytes, bytes]]:
        return {}

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        return ()

    def deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        *,
        refuted: bool = False,
    ) -> None:
        outputs = []
        for row, token in zip(step.sampled, tokens, strict=True):
            mine = self.tokens.setdefault(row, [])
            mine.append(token)
            outputs.append(control.RowOutput(row=row, delta=inference.Delta(tokens=len(mine))))
        self._emit(engine.EngineEvent(done=control.StepDone(step=step.number, outputs=outputs)))


class BenchEngine(Engine):
    """Has its stage from the start, and keeps what an epoch leaves behind."""

    def __init__(self, options: argparse.Namespace) -> None:
        handoff = socket.socket(fileno=options.handoff_fd)
        handoff.settimeout(5)
        super().__init__(FrameSocket(socket.socket(fileno=options.control_fd)), handoff)
        config, lo, hi = json.loads(options.config), options.lo, options.hi
        stage = random_stage(config, lo, hi, seed=0, dtype=getattr(mx, config["torch_dtype"]))
        warm_up(stage, 512)
        self._front: Any = Front(self._emit, config["vocab_size"]) if lo == 0 else None
        nothing = dict[str, Any].fromkeys(("kv_bytes_per_token", "kv_max_tokens", "state_bytes"), ())
        self._loaded = Loaded(stage, self._front, engine.LoadStage(lo=lo, hi=hi), nothing, None)
        self._traces, self._lo = options.traces, lo

    def _step(self, step: control.Step) -> None:
        for chunk in step.prefill.chunks if self._front is not None else ():
            if not chunk.start:
                self._front.open(chunk)
        super()._step(step)

    def _close_epoch(self, number: int) -> None:
        if (epoch := self._epoch) is not None:
            names = ("step", "started", "built", "fed", "launched", "ready", "sent")
            left = {
                "trace": [
                    {name: getattr(one, name) for name in names if hasattr(one, name)} for one in epoch.trace
                ],
                "tokens": self._front.tokens if self._front is not None else {},
                "peak_memory": mx.get_peak_memory(),
            }
            (self._traces / f"{epoch.number}-{self._lo}.json").write_text(json.dumps(left))
            if self._front is not None:
                self._front.tokens = {}
        super()._close_epoch(number)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {"control-fd": int, "handoff-fd": int, "config": str, "lo": int, "hi": int}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    options = parser.parse_args()
    logging.configure("engine")
    nvidia.prepare()
    device.prepare()
    sys.setswitchinterval(_SWITCH_SECONDS)
    BenchEngine(options).run()


if __name__ == "__main__":
    main()
