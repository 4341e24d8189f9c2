"""A member's seat in an epoch: its source of inputs, its exit, and the results of its stage.

| role | source | results | exit |
|---|---|---|---|
| alone | `Alone`: opened rows, own tokens | `Sampling` | `OwnExit`: the member's own prompts |
| head | `Head`: opened rows, tokens over the closing edge | `HandingOn` | `LinkExit` |
| middle | `Neighbour`: records of the member before | `HandingOn` | `LinkExit` |
| tail | `Neighbour` | `Sampling` | `LinkExit` |
| first rank of a tensor ring | `ShardHead`: as the head, and passes tokens on | `Alike` | `LinkExit` |
| rank between | `ShardNeighbour`: tokens of the rank before, passed on | `Alike` | `LinkExit` |
| alone or tail, of a model of vectors | as above | `Pooled` | as above |
| last rank | `ShardTail`: prompts of the rank before, own tokens | `Sampling` | `LinkExit` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sealring.node.engine.borders import Borders
from sealring.node.engine.drafts.sources import Sources
from sealring.node.engine.grammar import Grammars
from sealring.node.engine.receipts import Sampled
from sealring.node.engine.staging import ShardSpec, Stage
from sealring.node.engine.transfer import Transfer, transfer
from sealring.node.engine.vision.prefilling import Images
from sealring.node.engine.vision.tower import Tower
from sealring.node.wire.channel import EngineChannel

from .exits import Exit, LinkExit, OwnExit, Prompts
from .pooled import Pooled
from .results import Alike, HandingOn, Results, Sampling
from .sources import Alone, Head, Neighbour, ShardHead, ShardNeighbour, ShardTail, Source

__all__ = ["Prompts", "Seat", "seat_of"]


RECORD_DEADLINE = 120.0
"""Seconds that a member waits for a record whose step was announced."""


@dataclass(frozen=True)
class Seat:
    """The parts of a member's role in one epoch."""

    source: Source
    exit: Exit
    results: Results
    transfer: Transfer
    sampled: Sampled
    channel: EngineChannel | None
    prompts: Prompts | None


def seat_of(
    stage: Stage,
    fail: Callable[[BaseException], None],
    *,
    channel: EngineChannel | None,
    prompts: Prompts | None,
    grammars: Grammars | None = None,
    sources: Sources | None = None,
    tower: Tower | None = None,
    borders: Borders = Borders(),
    deadline: float = RECORD_DEADLINE,
) -> Seat:
    """The seat of the member that has this stage.

    `channel` is None in a ring of one. `prompts` is given at the head only, `grammars` at the tail, `tower`
    at a head that takes images, `sources` where drafts may be made, `borders` where layers are doubled.
    `fail` is called when the epoch cannot go on.
    """
    sampled = Sampled()
    spec, moves = stage.spec, transfer()
    images = Images(tower) if tower is not None else None
    if channel is None:
        assert prompts is not None
        source: Source = Alone(prompts, images)
        alone = OwnExit(prompts, fail)
        results: Results = (
            Pooled(stage, source, alone, moves, sampled)
            if stage.pools
            else Sampling(stage, source, alone, moves, grammars)
        )
        return Seat(source, alone, results, moves, sampled, None, prompts)
    link = LinkExit(channel, fail, sampled)
    if isinstance(spec, ShardSpec):
        if spec.is_head:
            assert prompts is not None
            source = ShardHead(spec, prompts, channel, moves, deadline, fail, link)
        elif spec.is_tail:
            source = ShardTail(spec, channel, moves, deadline, link)
        else:
            source = ShardNeighbour(spec, channel, moves, deadline, link)
    elif spec.is_head:
        assert prompts is not None
        source = Head(spec, prompts, channel, moves, deadline, fail, sources, images)
    else:
        source = Neighbour(spec, channel, moves, deadline, stage.prefill.spec, borders.before)
    if spec.is_tail and stage.pools:
        results = Pooled(stage, source, link, moves, sampled)
    elif spec.is_tail:
        tail = sources.tail if sources is not None else None
        results = Sampling(stage, source, link, moves, grammars, tail, sampled)
    elif isinstance(spec, ShardSpec):
        results = Alike(stage, source, link, moves)
    else:
        results = HandingOn(stage, source, link, moves, borders.after)
    return Seat(source, link, results, moves, sampled, channel, prompts)
