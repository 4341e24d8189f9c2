"""A log of the changes that a row's last runs of drafts have made in its caches, so that a settle can take
them back; and marks, at which a kept prefix can be cut.

Caches of keys and values are cut. A window drops its oldest tokens while it takes new ones in: those are kept
here. Any other cache, such as a recurrent state, knows no positions. It is kept as it was before each run.
The accepted tokens of a run that is accepted in part are computed again, from the run's kept inputs.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import MAX_UNSETTLED
from sealring.mesh.ring.limits import MAX_RUNS

from . import rows as caches
from .known import kind_of, parts_of
from .latents import ENTRIES
from .rows import Cache


def runs_of(cache: Cache, stages: int, steps_alike: bool) -> int:
    """The number of runs in flight that can be taken out of caches of this kind; `cache` is an empty one.

    The ring has `stages` stages. The number is 0 for an unknown kind of cache, and for a model that computes
    several tokens in a pass otherwise than in single steps (not `steps_alike`).
    """
    kinds = [_kind(part) for part in _parts(cache)]
    if None in kinds or not steps_alike:
        return 0
    return MAX_UNSETTLED // 2 if set(kinds) <= {_Keys} else min(MAX_RUNS, stages)


def can_go_back(cache: Cache) -> bool:
    """Whether a row's last tokens can be taken out of caches of this kind; `cache` is an empty one."""
    return None not in [_kind(part) for part in _parts(cache)]


class _Keys:
    """Keys and values of all tokens, of which the last are cut."""

    arrays: Sequence[mx.array] = ()

    def __init__(self, part: Any) -> None: ...

    def back(self, part: Any, _: Sequence[Any], tokens: int) -> None:
        caches.trim([part], tokens)


class _Window:
    """The tokens that a RotatingKVCache drops when it takes the next ones in."""

    def __init__(self, part: Any) -> None:
        slots = 0 if part.keys is None else part.keys.shape[2]
        rotated = part._idx < min(slots, part.offset)
        dropped = max(0, (slots if rotated else part._idx) - part.max_size + 1)
        self.arrays = _slots(part, part._idx if rotated else 0, dropped)

    def back(self, part: Any, runs: Sequence[_Window], tokens: int) -> None:
        part.offset -= tokens
        part._idx = min(part.offset, part.max_size)
        _join(part, runs, part.keys.shape[2], tokens, part._idx)


class _Chunk:
    """The tokens that a ChunkedKVCache drops before it takes the next ones in."""

    def __init__(self, part: Any) -> None:
        self._start = part.start_position
        self.arrays = _slots(part, 0, max(0, part.offset - self._start - part.chunk_size))

    def back(self, part: Any, runs: Sequence[_Chunk], tokens: int) -> None:
        if part.start_position == self._start:
            part.trim(tokens)
            return
        held = part.offset - part.start_position
        part.offset, part.start_position = part.offset - tokens, self._start
        _join(part, runs, held, tokens, part.offset - self._start)


def _slots(part: Any, first: int, count: int) -> list[mx.array]:
    """A copy of `count` tokens' keys and values from the slot `first` on, around the end."""
    if not count:
        return []
    slots = part.keys.shape[2]
    if first + count <= slots:
        return [mx.contiguous(array[..., first : first + count, :]) for array in (part.keys, part.values)]
    where = (first + mx.arange(count)) % slots
    return [mx.take(array, where, axis=2) for array in (part.keys, part.values)]


def _join(part: Any, runs: Sequence[_Window | _Chunk], length: int, tokens: int, held: int) -> None:
    """Makes the cache's arrays of what the runs dropped and its first `length` tokens: without the last
    `tokens`, the last `held`."""
    parts = [undo.arrays for undo in runs if undo.arrays]
    parts.append([array[..., :length, :] for array in (part.keys, part.values)])
    joined = [mx.concatenate(list(arrays), axis=2) for arrays in zip(*parts, strict=True)]
    end = joined[0].shape[2] - tokens
    part.keys, part.values = (array[..., end - held : end, :] for array in joined)


class _Whole:
    """A cache as it was. It knows no positions, so the accepted tokens of a run are computed again."""

    arrays: Sequence[mx.array] = ()

    def __init__(self, part: Any) -> None:
        self._held = copy.deepcopy(vars(part))  # which copies no array, but the reference to it

    def back(self, part: Any, _runs: Sequence[Any], _tokens: int) -> None:
        vars(part).update(copy.deepcopy(self._held))


class _Latents:
    """The cache of a layer of DeepSeek V4.1. Its entries grow with the row, and the first never change."""

    arrays: Sequence[mx.array] = ()

    def __init__(self, part: Any) -> None:
        entries = {name: getattr(part, name) for name in ENTRIES}
        self._counts = {name: 0 if one is None else one.shape[1] for name, one in entries.items()}
        self._held = copy.deepcopy({name: one for name, one in vars(part).items() if name not in ENTRIES})

    def back(self, part: Any, _runs: Sequence[Any], _tokens: int) -> None:
        vars(part).update(copy.deepcopy(self._held))
        for name, count in self._counts.items():
            setattr(part, name, getattr(part, name)[:, :count] if count else None)


_CACHE = "mlx_lm.models.cache"
_KINDS: dict[tuple[str, str], Any] = {
    (_CACHE, "RotatingKVCache"): _Window,
    (_CACHE, "ChunkedKVCache"): _Chunk,
    (_CACHE, "ArraysCache"): _Whole,
    ("mlx_lm.models.deepseek_v41", "LayerCache"): _Latents,
}
"""Classes by the module and name of mlx-lm's, because a model's own module is loaded with the model only."""


def _kind(part: Any) -> Any:
    """How one cache is taken back; None if nobody knows."""
    if caches.trimmable([part]):
        return _Keys
    kind = _KINDS.get((type(part).__module__, type(part).__qualname__))
    return None if getattr(part, "keep", 0) else kind


Mark: TypeAlias = Mapping[int, Any]
"""Copies of a row's caches that cannot be cut, as they were at one length; by their place."""


def mark(cache: Cache) -> Mark:
    """The mark of a row's cache as it is now. It keeps these caches' arrays, so they ought to be short."""
    found = {}
    for place, part in enumerate(_parts(cache)):
        kind = _kind(part)
        if kind is not _Keys:
            found[place] = _Latents(part) if kind is _Latents else _Whole(part)
    return found


def marked(row: Cache, tokens: int) -> tuple[Mark, Cache]:
    """A mark of a row that goes on, at its `tokens` tokens, and the lazy copies of caches that it has."""
    copies = caches.copied(row)
    uncut = [part for part in _parts(copies) if _kind(part) is not _Keys]
    for part in uncut:
        kind_of(part).cut(part, tokens)
    caches.detached(uncut)
    return mark(copies), uncut


def cut_to(cache: Cache, tokens: int, at: Mark) -> Cache:
    """A lazy copy of the first tokens of a row's cache, which was marked at that length."""
    copies = caches.copied(cache)
    for place, part in enumerate(_parts(copies)):
        if place in at:
            at[place].back(part, (), 0)
        else:
            kind_of(part).cut(part, tokens)
    return copies


def go_back(cache: Cache, tokens: int, at: Mark) -> None:
    """Takes the last `tokens` tokens out of a row's cache, which was marked at the length that is left."""
    for place, part in enumerate(_parts(cache)):
        if place in at:
            at[place].back(part, (), 0)
        else:
            caches.trim([part], tokens)


def _parts(cache: Cache) -> list[Any]:
    return [part for entry in cache for part in parts_of(entry)]


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: int
    undos: Sequence[Any]
    inputs: Sequence[mx.array]
    """Only where tokens may have to be computed again."""


class UndoLog:
    """The log of one row's runs since it was settled."""

    def __init__(self, cache: Cache, runs: int) -> None:
        """`runs`: how many of the last runs are kept, as `runs_of` says."""
        self._parts = _parts(cache)
        self._kinds = [_kind(part) for part in self._parts]
        self._recomputes = not set(self._kinds).isdisjoint((_Whole, _Latents))
        self._runs: deque[_Run] = deque(maxlen=runs)

    def begin(self, inputs: Sequence[mx.array]) -> None:
        """Notes a run that is about to be computed on these inputs, [1, tokens, ...] each."""
        undos = [kind(part) for kind, part in zip(self._kinds, self._parts, strict=True)]
        self._runs.append(_Run(inputs[0].shape[1], undos, list(inputs) if self._recomputes else ()))

    def end(self) -> None:
        """Has what was dropped computed with the next step: until then it would hold the whole window."""
        for part, undo in zip(self._parts, self._runs[-1].undos, strict=True):
            if undo.arrays:
                part.keys, part.values = mx.depends([part.keys, part.values], undo.arrays)

    def settle(self, surplus: int, compute: Callable[[list[mx.array]], object]) -> bool:
        """Takes the last `surplus` tokens back; `compute` runs the stage on inputs of the row.

        Returns whether tokens were computed again, lazily. Raises InvalidInput (BAD_STEP) if they go back
        further than the runs that are kept.
        """
        undone: list[_Run] = []
        left = surplus
        while left > 0:
            if not self._runs:
                raise InvalidInput(
                    "drafts are to be taken back further than this member can",
                    reason="BAD_STEP",
                    hint="the gateway must go by what the member said when it attached",
                )
            undone.insert(0, self._runs.pop())
            left -= undone[0].tokens
        if not undone:
            return False
        again = -left if self._recomputes else 0
        for place, part in enumerate(self._parts):
            undone[0].undos[place].back(part, [run.undos[place] for run in undone], surplus + again)
        if again:
            compute([array[:, :again] for array in undone[0].inputs])
        return again > 0
