"""What a gateway has a ring do whose tail guesses, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from stagering import CHUNK, Prompts, Ring

from sealring.node.engine import RowParameters
from sealring.node.engine.drafts import TailDrafter
from sealring.node.engine.staging import Stage
from sealring.node.wire.channel import RecordHeader
from sealring.v1 import control_pb2 as control

MTP = control.DRAFT_SOURCE_MTP_HEAD

PARAMETERS = {
    "greedy": RowParameters(),
    "drawn": RowParameters(temperature=1.0, top_p=0.9, seed=5, logprobs=2),
    "penalties": RowParameters(
        temperature=0.8, seed=9, repetition_penalty=1.5, repetition_context_size=6, frequency_penalty=0.5
    ),
}


class Between(SimpleQueue[Any]):
    """A link's records, each as a member on the way changes it."""

    def __init__(self, change: Callable[[RecordHeader, bytes], bytes]) -> None:
        super().__init__()
        self._change = change

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item and (item[0], self._change(*item)))


class Gateway:
    """Steps rows, one step after the other. Guesses are `asked` for, from a source."""

    def __init__(
        self, ring: Ring, source: int = control.DRAFT_SOURCE_MTP_HEAD, *, asked: bool = True
    ) -> None:
        self._ring, self._number, self._source, self.asked = ring, 0, source, asked

    @property
    def taps(self) -> bool:
        return self.asked and self._source == control.DRAFT_SOURCE_HIDDEN

    def step(self, *changes: control.Change, **work: Any) -> None:
        self._number += 1
        self._ring.announce(control.Step(number=self._number, changes=changes, **work))
        self._ring.wait_for(self._number)

    def prefill(self, row: int = 1, *, prefix: int = 0, start: int = 0) -> None:
        prompts = self._ring.prompts
        record, total = len(prompts.parameters(row)), len(prompts.prompt(row))
        for begin in range(start, total, CHUNK):
            end = min(begin + CHUNK, total)
            chunk = control.Chunk(row=row, start=begin, end=end, prompt_tokens=total, taps=self.taps)
            if begin == start:
                chunk.params_bytes, chunk.prefix = record, prefix
            self._number += 1
            step = control.Step(number=self._number, prefill=control.Prefill(chunks=[chunk]))
            self._ring.announce(step)
        self._ring.wait_for(self._number)

    def decode(self, *changes: control.Change, source: int = 0, **work: Any) -> None:
        source = source or self._source if any(work.values()) else 0
        decode = control.Decode(lane=0, asks=self.asked, taps=self.taps, source=source, **work)
        self.step(*changes, decode=decode)

    def settle(self, row: int = 1) -> control.Change:
        prompts = self._ring.prompts
        tokens = len(prompts.prompt(row)) + len(prompts.answers[row]) - 1
        return control.Change(settle=control.Settle(row=row, tokens=tokens))


def admit(row: int = 1) -> control.Change:
    return control.Change(admit=control.Admit(row=row, lane=0))


def evict(row: int) -> control.Change:
    return control.Change(evict=control.Evict(row=row))


def said(stages: Sequence[Stage], prompts: Mapping[int, list[int]], tokens: int) -> dict[int, list[int]]:
    """What the rows say alone and without guesses, as many tokens at least."""
    found = {}
    for row, prompt in prompts.items():
        ring = Ring(stages, Prompts({1: (prompt, RowParameters())}))
        try:
            gateway = Gateway(ring, asked=False)
            gateway.prefill()
            gateway.decode(admit())
            while len(ring.prompts.answers[1]) < tokens:
                gateway.decode()
        finally:
            ring.close()
        found[row] = ring.prompts.answers[1]
    return found


def company_leaves_prefixes_stay(stages: Sequence[Stage], drafter: TailDrafter, words: int) -> None:
    """A row has drafts, then company without, then is alone; another begins with its prefix; a third one
    follows in the next epoch. All say what they would without drafts, many of which are right."""
    chance, source = random.Random(4), drafter.facts.source
    text = [chance.randrange(words) for _ in range(2 * CHUNK)]
    texts = {1: text, 2: text[::-1], 3: [*text, 5, 6, 7], 4: text}
    coming = said(stages, texts, 96)
    prompts = Prompts({row: (one, RowParameters(prompt=tuple(one))) for row, one in texts.items()})
    ring = Ring(stages, prompts, tail_drafter=drafter)
    gateway = Gateway(ring, source)

    def drafted(row: int, *changes: control.Change) -> None:
        """A step that brings guesses, and some of them as drafts."""
        gateway.decode(*changes, guesses=3)
        for _ in range(3):
            gateway.decode(drafts=3, guesses=3)
            gateway.decode(gateway.settle(row), guesses=3)

    keep = control.Change(keep=control.Keep(prefix=1, row=1, tokens=len(text)))
    try:
        gateway.prefill()
        drafted(1, keep, admit())
        gateway.asked = False
        gateway.prefill(2)
        gateway.decode(admit(2))
        gateway.decode()
        gateway.asked = True
        drafted(1, evict(2))
        gateway.prefill(3, prefix=1, start=len(text))
        before = len(prompts.answers[3])
        drafted(3, evict(1), admit(3))
        assert len(prompts.answers[3]) - before > 7  # steps, so drafts were right
        gateway.decode(drafts=3, guesses=3)  # and not settled when the epoch ends
        ring.break_off()
        ring.close()
        prompts.steps.clear()
        ring = Ring(stages, prompts, tail_drafter=drafter, number=2)
        gateway = Gateway(ring, source)
        gateway.prefill(4)
        drafted(4, admit(4))
    finally:
        ring.close()
    assert not ring.faults
    assert not drafter.failed
    for row, answer in prompts.answers.items():
        assert answer == coming[row][: len(answer)]
    assert [len(prompts.answers[row]) > 8 for row in texts] == [True, False, True, True]
