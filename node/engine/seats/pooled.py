"""Results of a model that ends with vectors: each prompt has its last token's, and no tokens follow."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import Chunk, ResolvedStep
from sealring.node.engine import params
from sealring.node.engine.lanes import Lane, Row
from sealring.node.engine.logprobs import pooled
from sealring.node.engine.receipts import Sampled
from sealring.node.engine.staging import Stage
from sealring.node.engine.threads import StepTimes
from sealring.node.engine.transfer import Transfer

from .exits import Exit
from .results import Logits, StageCall
from .sources import Source


class Pooled(Logits):
    """Vectors at the tail. Each travels to the head as float32, which has every number of a half precision,
    behind a token that means nothing. `sampled` notes that, where a row asks for a receipt."""

    def __init__(
        self, stage: Stage, source: Source, way_out: Exit, transfer: Transfer, sampled: Sampled
    ) -> None:
        super().__init__(stage, source, way_out, transfer)
        self._sampled = sampled

    def begin(self, step: ResolvedStep, chunk: Chunk, row: Row, record: bytes) -> None:
        row.parameters = parameters = params.decode(record)
        if parameters.receipt:
            self._sampled.begin(row.number, 1, parameters.receipt, parameters.position)

    def first_tokens(
        self, step: ResolvedStep, prompts: Sequence[tuple[Row, mx.array]], times: StepTimes
    ) -> None:
        vectors = mx.concatenate([vector for _, vector in prompts]).astype(mx.float32)
        tokens = mx.zeros((len(prompts),), mx.uint32)
        results = self._transfer.send_buffer([tokens, vectors.flatten().view(mx.uint32)])
        times.built = time.perf_counter()
        self._next_chunk(times)
        self._hand_out(step, pooled(*vectors.shape), tokens, results, times)

    def decode(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        raise InvalidInput(
            "a prompt for a vector has no tokens behind it",
            reason="BAD_STEP",
            hint="gateway and head disagree; the epoch must end",
        )

    def verify(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        self.decode(call, lane, outputs)
