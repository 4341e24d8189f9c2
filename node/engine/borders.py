"""The caches of doubled layers, which go one hop on after each chunk of a prompt (`staging.doubled`).

They travel as blocks do on disk: keys and values of the chunk's tokens, then windows and states as they are
behind it. So a prompt's last chunk is followed by no more than any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from sealring.mesh.errors import Internal, ModelError
from sealring.mesh.ring.composition import Chunk, ResolvedStep
from sealring.node.engine.blocks import BlockLayout, layout_of
from sealring.node.engine.caches import Cache
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.doubled import Prefill
from sealring.node.wire.channel import Kind, RecordHeader


@dataclass(frozen=True)
class Border:
    """The doubled layers between two members, at one of them. `places` are those of their caches in a row's;
    None for one that the member behind the border computes itself. `empty` are caches like them."""

    places: Sequence[int | None]
    layout: BlockLayout
    empty: Cache

    def record(self, step: ResolvedStep, chunk: Chunk) -> RecordHeader:
        """The header of what follows a chunk."""
        size = self.layout.bytes(chunk.tokens) + self.layout.snapshot_bytes(chunk.end)
        return RecordHeader(Kind.CACHES, step.number, step.digest, "uint8", (size,), size)

    def content(self, cache: Cache, chunk: Chunk) -> list[mx.array]:
        """The bytes of what follows a chunk, lazily, out of a row's cache."""
        own = [cache[place] for place in self.places if place is not None]
        snapshot = self.layout.snapshot(own, chunk.end)
        if snapshot is None:
            raise Internal(f"caches of doubled layers are not those of {chunk.end} tokens")
        return [*self.layout.views(own, chunk.start, chunk.end), *snapshot]

    def fill(self, cache: Cache, chunk: Chunk, content: memoryview) -> None:
        """Puts what followed a chunk into a row's cache, lazily."""
        own = [
            none if place is None else cache[place]
            for place, none in zip(self.places, self.empty, strict=True)
        ]
        wanted = [place is not None for place in self.places]
        self.layout.extend(own, wanted, content, chunk.start, chunk.end)


@dataclass(frozen=True)
class Borders:
    """A member's borders: with the member before it, and with the next; None without doubled layers."""

    before: Border | None = None
    after: Border | None = None


def borders_of(stage: Stage) -> Borders:
    """The borders of a stage, which decodes. For the compute thread. Raises ModelError (NOT_DOUBLED) for a
    model whose caches do not travel."""
    prefill = stage.prefill
    if not isinstance(prefill, Prefill):
        return Borders()
    first = stage.caches_of(stage.spec.lo, prefill.spec.lo)
    last = prefill.caches_of(stage.spec.hi, prefill.spec.hi)
    before = after = None
    if first:
        before = _border(stage, first, [prefill.row_place(cache) for cache in first])
    if last:
        after = _border(prefill, last, [prefill.cache_places.index(cache) for cache in last])
    return Borders(before, after)


def _border(stage: Stage, caches: Sequence[int], places: Sequence[int | None]) -> Border:
    layout = layout_of(stage, "", [stage.cache_places.index(cache) for cache in caches])
    if layout is None:
        raise ModelError(
            f"no layer of {stage.spec.model_type} can be on both sides of a border: its caches do not travel",
            reason="NOT_DOUBLED",
            hint="give each layer to one member",
        )
    return Border(places, layout, layout.of_row(stage.make_cache()))
