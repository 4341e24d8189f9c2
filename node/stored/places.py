"""The files of a chain of prompts' prefixes, and the bytes that each layer has in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sealring.mesh.ring.prefix_names import NAME_BYTES, Chain


@dataclass(frozen=True, slots=True)
class Place:
    """The tokens [first, end) of a prompt whose first `end` tokens have this name in their scope."""

    name: bytes
    first: int
    end: int


class Unit(NamedTuple):
    """A file: a block, or the snapshot at a chain's end."""

    place: Place
    is_snapshot: bool = False


def blocks_of(chain: Chain) -> list[Place]:
    """The places of a chain's blocks."""
    return [
        Place(name, first, end)
        for name, (first, end) in zip(chain.names, pairwise([0, *chain.edges]), strict=True)
    ]


def snapshot_of(chain: Chain) -> Place:
    """The place of the snapshot at the end of a chain."""
    name = hashlib.sha256(b"sealring/v1 snapshot" + chain.names[-1]).digest()[:NAME_BYTES]
    return Place(name, 0, chain.tokens)


def units_of(chain: Chain) -> list[Unit]:
    """The files that there may be of a chain, in the order in which they are read."""
    blocks = [Unit(place) for place in blocks_of(chain)]
    return [*blocks, Unit(snapshot_of(chain), is_snapshot=True)] if blocks else []


class LayerBytes(NamedTuple):
    """Bytes of one layer: of a token in a block, and of each array in a snapshot, which is of as many tokens
    as its window has at most; 0 for a state."""

    token: int = 0
    held: tuple[tuple[int, int], ...] = ()

    def size(self, unit: Unit) -> int:
        place = unit.place
        if unit.is_snapshot:
            return sum(each * (min(place.end, window) if window else 1) for each, window in self.held)
        return self.token * (place.end - place.first)


class StageTable(NamedTuple):
    """The bytes of a stage's layers, in order, and behind them of what the model's code wants of others: all
    zeros. `digest` is that of the caches' layout."""

    digest: bytes
    layers: tuple[LayerBytes, ...]
    rest: LayerBytes = LayerBytes()

    def size(self, unit: Unit) -> int:
        """Bytes of a file's content."""
        return self.before(len(self.layers), unit) + self.rest.size(unit)

    def before(self, layer: int, unit: Unit) -> int:
        """Bytes of the layers before this one of the stage, from 0 on."""
        return sum(each.size(unit) for each in self.layers[:layer])

    def some(self, first: int, end: int) -> StageTable:
        """The table of a stage of these layers alone."""
        return StageTable(self.digest, self.layers[first:end])
