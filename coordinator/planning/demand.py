"""The memory that a model needs, in bytes: weights, embedding and head, and one row's KV cache and logits."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from sealring.mesh.errors import ModelError
from sealring.mesh.names import is_commit, is_sha256
from sealring.mesh.prompt.options import is_card
from sealring.mesh.ring.composition import MAX_DRAFTS
from sealring.mesh.ring.limits import (
    DRAFT_MARKS,
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_PREFILL_CHUNK,
    MAX_RUNS,
    MAX_TAPS,
)
from sealring.v1 import model_pb2

HEADROOM_PERCENT = 10
"""Share of a member's usable memory that no plan touches: activations, allocator slack, prefill peaks. Where
a member serves several rings, what each engine more needs of these is counted besides (`survey.py`)."""

LOGITS_COPIES = 9
"""Float32 arrays of rows x vocabulary that the tail holds at once while it samples.

A step with `top_p`, which most clients send, peaks at 8.5 of them beside half of one for the logits
(`mx.get_peak_memory`, vocabulary of 151,936, 8 and 32 rows). Greedy rows need one. Penalties with every
filter need 14; the headroom covers the difference to 9.
"""

CHUNK_STATES = 64
"""Arrays of the size of a chunk's stage state that one layer and those in flight hold at once. An estimate:
the widest products of common models are 10 to 14 states, and one layer's are there until the next one's
are."""

SCORES_PART = 32
"""Bytes of a stage's state for each byte of scores that attention over quantized caches writes out.

Scores exist for each token of a chunk and of the context. They take 4 bytes for each head, which is 64
numbers of a state in half precision.
"""

LEAST_CHUNK = 256
"""Tokens of a chunk for which the headroom always suffices."""

LONG_CACHE, CACHE_PART = 8192, 16
"""A cache of LONG_CACHE tokens has room for this part of it (`node/engine/caches/plain.py`)."""

MARKS = 2
"""Marks for which a budget has room beside each row: the end of its answer, and the user's last question."""

DRAFTER = "drafter"
"""The resident of a tail that reads hidden states."""

DRAFTED = MAX_RUNS * (1 + MAX_DRAFTS)
"""Tokens of a row that may have to be taken back where caches cannot be cut (`node/engine/folder.py`)."""

MAX_VOCABULARY = 1 << 24
_MAX_BYTES = 1 << 50
_MAX_QUANTIZED = 8
_MAX_WHY = 1000
_MAX_RESIDENTS = 16
_ENDS = (model_pb2.RING_END_HEAD, model_pb2.RING_END_TAIL)
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def capacity(memory_usable: int) -> int:
    """Bytes of a member that a plan may use: all but the headroom."""
    return memory_usable - memory_usable * HEADROOM_PERCENT // 100


@dataclass(frozen=True)
class Demand:
    """A model at one context length: `weights` and `row` are bytes per layer, one row for the latter.

    `logits` are the bytes of a row's logits and their copies. `rows` is the number of rows whose logits have
    to fit, as all may be in one step. `drafts` are the bytes per layer that take one row's drafts back, and
    `inputs` those that each stage keeps besides. `residents` have all of their bytes at this context. `mark`
    are the bytes per layer of one mark. A token of a prompt takes `handoff` bytes from one stage to the next;
    `travelling` are those per layer of its caches, where these follow.
    """

    weights: tuple[int, ...]
    row: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    logits: int = 0
    rows: int = 1
    drafts: tuple[int, ...] = ()
    inputs: int = 0
    residents: tuple[model_pb2.Resident, ...] = ()
    mark: tuple[int, ...] = ()
    handoff: int = 0
    travelling: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        profile: model_pb2.ModelProfile,
        context: int,
        kv_bits: int = 0,
        chunk: int = 0,
        slack: int = 0,
        rows: int = 1,
        speculate: bool = False,
        whole: bool = False,
    ) -> Demand:
        """The demand of a checked profile; a windowed layer holds its window and a chunk of a prompt at most.
        One whose window is no shorter than the context grows as if it had none (`node/engine/folder.py`).
        `slack` is the number of further tokens that a row's cache may have room for. `whole`: each member has
        all layers, so that none is a head or tail that holds residents.

        Raises ModelError (KV_BITS_UNSUPPORTED).
        """
        most = context + slack + (context // CACHE_PART if context >= LONG_CACHE else 0)
        layers = list(
            zip(kv_bytes_per_token(profile, kv_bits), profile.kv_max_tokens, profile.state_bytes, strict=True)
        )
        row = tuple(
            per_token * (min(most, _windowed(window, chunk)) if 0 < window < context else most) + state
            for per_token, window, state in layers
        )
        mark = tuple(per_token * min(window, context) + state for per_token, window, state in layers)
        logits = LOGITS_COPIES * 4 * profile.vocab_size
        outer = profile.embed_bytes, profile.head_bytes, profile.tied
        guesses = speculate and profile.trimmable
        held = [] if whole else [one for one in profile.residents if guesses or not one.guesses]
        residents = tuple(_sized(one, profile, context, kv_bits, chunk) for one in held)
        made = cls(*(tuple(profile.layer_bytes), row, *outer, logits, rows), residents=residents, mark=mark)
        travelling = tuple(  # windows and states as they are behind each chunk
            per_token * (window / (chunk or 1) if 0 < window < context else 1) + state / (chunk or 1)
            for per_token, window, state in layers
        )
        made = replace(made, handoff=profile.handoff_bytes_per_token, travelling=travelling)
        if not guesses:
            return made
        drafts = tuple(
            per_token * DRAFTED * (0 < window < context) + MAX_RUNS * state
            for per_token, window, state in layers
        )
        inputs = DRAFTED * profile.handoff_bytes_per_token * any(profile.state_bytes)
        return replace(made, drafts=drafts, inputs=inputs)

    @cached_property
    def per_layer(self) -> list[int]:
        """Weights and one row of each layer, with its drafts: what has to fit."""
        drafts = self.drafts or (0,) * len(self.row)
        return [sum(each) for each in zip(self.weights, self.row, drafts, strict=True)]

    @cached_property
    def _ends(self) -> list[int]:
        """Bytes of the first 0, 1, 2, ... layers."""
        return [0, *accumulate(self.per_layer)]

    @cached_property
    def _runs(self) -> dict[int, int]:
        return {}

    def longest_run(self, room: int) -> int:
        """The largest number of consecutive layers that fit into `room` bytes."""
        if room not in self._runs:
            ends, start, longest = self._ends, 0, 0
            for end in range(1, len(ends)):
                while ends[end] - ends[start] > room:
                    start += 1
                longest = max(longest, end - start)
            self._runs[room] = longest
        return self._runs[room]

    def first_layers(self, room: int) -> int:
        """The number of layers from the first on that fit into `room` bytes."""
        return max(0, bisect_right(self._ends, room) - 1)

    def last_layers(self, room: int) -> int:
        """The number of layers up to the last that fit into `room` bytes."""
        return max(0, len(self._ends) - 1 - bisect_left(self._ends, self._ends[-1] - room))

    def outer_weights(self, stages: int) -> list[int]:
        """Bytes of weights besides layers, per rank: embedding at rank 0; head, and a tied embedding, at the
        tail."""
        if stages == 1:
            return [self.embedding + self.head]
        tail = self.head + (self.embedding if self.tied else 0)
        return [self.embedding, *[0] * (stages - 2), tail]

    @property
    def head_layers(self) -> int:
        """The first layers that have to be at the head, for its residents."""
        return max([1, *(one.layers for one in self.residents)])

    def residents_at(self, rank: int, stages: int) -> list[model_pb2.Resident]:
        """The residents at this rank. A ring of one has no use for those that guess."""
        place = {model_pb2.RING_END_HEAD: 0, model_pb2.RING_END_TAIL: stages - 1}
        return [one for one in self.residents if place[one.at] == rank and (stages > 1 or not one.guesses)]

    def row_logits(self, rank: int, stages: int) -> int:
        """Bytes that a row's logits and their copies take at this rank: none before the tail."""
        return self.logits if rank == stages - 1 else 0

    def extras(self, stages: int) -> list[int]:
        """Bytes besides layers per rank that have to fit: weights, the logits of `rows` rows, `inputs` and
        residents."""
        return [
            weights
            + self.rows * self.row_logits(rank, stages)
            + self.inputs
            + sum(one.bytes for one in self.residents_at(rank, stages))
            for rank, weights in enumerate(self.outer_weights(stages))
        ]

    def weight_bytes(self, first: int, end: int, rank: int, stages: int) -> int:
        """Weights of layers [first, end) at this rank, with what comes besides."""
        return sum(self.weights[first:end]) + self.outer_weights(stages)[rank]

    def row_bytes(self, first: int, end: int) -> int:
        """One row's cache at the full context for layers [first, end)."""
        return sum(self.row[first:end])

    def marks_bytes(self, first: int, end: int) -> int:
        """The marks of one row, MARKS of them, for layers [first, end); 0 where caches can be cut."""
        return MARKS * sum(self.mark[first:end])

    def draft_bytes(self, first: int, end: int) -> int:
        """What takes one row's drafts back in the layers [first, end) of one stage."""
        return sum(self.drafts[first:end]) + self.inputs

    def total(self, stages: int) -> int:
        """Everything that `stages` ranks hold together, one row included."""
        return sum(self.per_layer) + sum(self.extras(stages))


def _windowed(window: int, chunk: int) -> int:
    """Tokens that a windowed layer holds: no fewer than as long as its window has not moved, so that a longer
    context never needs less."""
    return window + max(chunk, window // CACHE_PART if window >= LONG_CACHE else 0)


def _sized(
    one: model_pb2.Resident, profile: model_pb2.ModelProfile, context: int, kv_bits: int, chunk: int
) -> model_pb2.Resident:
    """A resident with all that it takes at this context; another model is the profile's draft model."""
    made = model_pb2.Resident()
    made.CopyFrom(one)
    made.bytes += one.bytes_per_token * context
    made.bytes_per_token = 0
    if one.model and not profile.draft.taps:
        made.bytes = draft_bytes(profile, context, kv_bits, chunk)
    return made


def with_draft(profile: model_pb2.ModelProfile, name: str, draft: model_pb2.ModelProfile) -> None:
    """Adds a draft model, or a drafter of hidden states, in the place of what would guess else."""
    made = model_pb2.Resident(name="draft", guesses=True)
    made.at = model_pb2.RING_END_HEAD
    if draft.taps:
        made.CopyFrom(draft.residents[0])
    made.model, made.does = name, f"{name} guesses"
    profile.draft.CopyFrom(draft)
    held = [*(one for one in profile.residents if not one.guesses), made]
    del profile.residents[:]
    profile.residents.extend(held)


def draft_context(profile: model_pb2.ModelProfile, context: int) -> int:
    """Tokens that the caches of a profile's draft model hold, with rows of `context` tokens."""
    return min(context, profile.draft.max_context or context)


def draft_kv_bits(profile: model_pb2.ModelProfile, kv_bits: int) -> int:
    """The bits of the draft model's caches: those of the large model, where it can keep them so."""
    return kv_bits if any(one.bits == kv_bits for one in profile.draft.quantized) else 0


def draft_bytes(profile: model_pb2.ModelProfile, context: int, kv_bits: int, chunk: int) -> int:
    """Bytes of the whole draft model, with the caches of one row as long as any, and DRAFT_MARKS times the
    windows and states of a row (`node/engine/drafts/model.py`)."""
    draft, most = profile.draft, draft_context(profile, context)
    bits = draft_kv_bits(profile, kv_bits)
    whole = Demand.of(draft, most, bits, chunk, LEAST_CHUNK)
    mark = sum(
        per_token * (min(most, window + chunk) if 0 < window < most else 0) + state
        for per_token, window, state in zip(
            kv_bytes_per_token(draft, bits), draft.kv_max_tokens, draft.state_bytes, strict=True
        )
    )
    return sum(whole.per_layer) + sum(whole.outer_weights(1)) + DRAFT_MARKS * mark


def longest_chunk_in(memory_usable: int, profile: model_pb2.ModelProfile, context: int, kv_bits: int) -> int:
    """Tokens of the longest chunk, a power of two, whose intermediate results take half of the memory that no
    plan touches; at least LEAST_CHUNK."""
    each = (CHUNK_STATES + 4 * len(profile.draft.taps)) * profile.handoff_bytes_per_token
    if kv_bits:
        each += context * profile.handoff_bytes_per_token // SCORES_PART
    fitting = (memory_usable - capacity(memory_usable)) // 2 // max(1, each)
    return max(LEAST_CHUNK, 1 << max(1, fitting).bit_length() - 1)


def read_bytes(profile: model_pb2.ModelProfile, first: int, end: int) -> int:
    """Bytes of weights that a decode step of layers [first, end) reads, with the output head after the last.
    Of the embedding it reads one row a token, unless the head is the embedding."""
    read = sum(profile.layer_bytes[first:end])
    if end == profile.layers:
        read += profile.head_bytes + (profile.embed_bytes if profile.tied else 0)
    return read


def kv_bytes_per_token(profile: model_pb2.ModelProfile, kv_bits: int) -> Sequence[int]:
    """KV bytes a token, per layer, with caches of `kv_bits` bits (0: unquantized).

    Raises ModelError (KV_BITS_UNSUPPORTED).
    """
    if not kv_bits:
        return profile.kv_bytes_per_token
    for one in profile.quantized:
        if one.bits == kv_bits:
            return one.kv_bytes_per_token
    raise ModelError(
        profile.not_quantizable or f"the nodes do not keep the model's KV cache in {kv_bits} bits",
        hint="deploy it without kv_bits",
        reason="KV_BITS_UNSUPPORTED",
        param="kv_bits",
    )


def _bad_profile(what: str) -> ModelError:
    return ModelError(
        f"a node's profile of the model has a bad {what}",
        hint="run the same release on every node",
        reason="BAD_PROFILE",
    )


def check_profile(profile: model_pb2.ModelProfile) -> None:
    """Bound every number that a node reported. Raises ModelError (BAD_PROFILE)."""
    for what, bad in _faults(profile):
        if bad:
            raise _bad_profile(what)
    if profile.draft.taps:
        _check_drafter(profile.draft, profile.layers)
    elif profile.HasField("draft"):
        check_profile(profile.draft)


def _check_drafter(drafter: model_pb2.ModelProfile, layers: int) -> None:
    """As `check_profile`, of a drafter that reads hidden states of a model with `layers` layers."""
    taps, held = drafter.taps, drafter.residents
    bad = len(taps) > MAX_TAPS or any(one >= other for one, other in pairwise([*taps, layers]))
    one = held[0] if len(held) == 1 else model_pb2.Resident()
    bad |= one.name != DRAFTER or one.at != model_pb2.RING_END_TAIL or not is_sha256(drafter.digest)
    if bad or max(one.bytes, one.bytes_per_token * MAX_CONTEXT) > _MAX_BYTES:
        raise _bad_profile("drafter")


def _faults(profile: model_pb2.ModelProfile) -> Iterator[tuple[str, bool]]:
    """What is bounded, and whether it is beyond its bounds."""
    layers, kinds = profile.layers, profile.quantized
    yield "number of layers", not 1 <= layers <= MAX_LAYERS
    yield "list of quantized cache sizes", len(kinds) > _MAX_QUANTIZED
    per_layer: list[tuple[str, Sequence[int]]] = [
        ("layer sizes", profile.layer_bytes),
        ("cache sizes", profile.kv_bytes_per_token),
        ("cache windows", profile.kv_max_tokens),
        ("state sizes", profile.state_bytes),
        *(("quantized cache sizes", one.kv_bytes_per_token) for one in kinds),
    ]
    for what, values in per_layer:
        yield what, len(values) != layers or max(values) > _MAX_BYTES
    outer = profile.embed_bytes, profile.head_bytes, profile.handoff_bytes_per_token
    yield "embedding or head size", max(outer) > _MAX_BYTES
    names = [one.name for one in profile.residents]
    yield "list of residents", len(set(names)) < len(names) or len(names) > _MAX_RESIDENTS
    for one in profile.residents:
        yield "resident", not _WORD.match(one.name) or one.at not in _ENDS
        yield f"size of {one.name}", max(one.bytes, one.bytes_per_token * MAX_CONTEXT) > _MAX_BYTES
        at_head = one.at == model_pb2.RING_END_HEAD
        yield f"number of layers for {one.name}", one.layers > (layers if at_head else 0)
        yield f"text about {one.name}", max(len(one.does), len(one.model)) > _MAX_WHY
    yield "number of an image's tokens", profile.image_tokens > MAX_PREFILL_CHUNK
    yield "reason", max(len(profile.not_seeing), len(profile.not_quantizable)) > _MAX_WHY
    yield "context", profile.max_context > MAX_CONTEXT
    yield "vocabulary", profile.vocab_size > MAX_VOCABULARY
    yield "digest or model type", not (is_sha256(profile.digest) and _WORD.match(profile.model_type))
    yield "card", not is_card(profile.card)
    yield "commit", bool(profile.commit) and not is_commit(profile.commit)
    known = not profile.hub_files or (profile.commit and is_sha256(profile.hub_files))
    yield "hash of the hub's files", not known
    yield "draft model", profile.draft.HasField("draft")
