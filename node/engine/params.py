"""The parameter record: a row's sampling parameters, on their way from the head to the tail.

It travels sealed, as all records do. Members in between pass its bytes on and read no more of it than the
names of the prompt's blocks and where its images are. In a pipeline of three and more these stand apart, and
the head seals the rest for the tail (`node.engine.row_seal`). Its length shows next to nothing of its
content: it is a multiple of 256 bytes, and one block unless the row has biases, a repetition penalty, a
grammar or many images. Tokens of the prompt, for the tail or for their log-probabilities, take more. With
a grammar it is a power of two. The names, 16 bytes for each block, are those of a prompt in clear; an image
takes 16 bytes as well.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from sealring.mesh.crypto.keys import TAG_BYTES
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt import options
from sealring.mesh.prompt import validate as limits
from sealring.mesh.receipt.digests import HASH_BYTES
from sealring.mesh.ring.prefix_names import MAX_CHAIN_BYTES, NAME_BYTES, Chain
from sealring.node.engine.staging.grid import Grid, possible
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from sealring.node.engine.grammar import Matcher

BLOCK = 256
DEFAULT_CONTEXT_SIZE = 20
"""Tokens that a repetition penalty looks at unless the request says otherwise; mlx-lm's own default."""

MOST_COMPUTED = 1 << 17
"""Tokens of a prompt that is sent to the tail for its MTP head, at most: half of a record. Behind a longer
one it guesses by the answer alone."""

MAX_MASKED = 1024
"""Most masked tokens of a row. A request names few, and a model has some dozens that end an answer."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Parameters by which one row is sampled, and the log-probabilities that it asks for.

    `temperature` 0 is greedy; `top_p` 1, `min_p` 0, `top_k` 0, `repetition_penalty` 1 and the other penalties
    at 0 are off. `logit_bias` has rising token ids. `prompt_tail` holds the prompt's last tokens, as many as
    the repetition penalty looks at. `logprobs` is the number of likeliest tokens beside each token, or
    None without log-probabilities. `scored` is the prompt if it asks for log-probabilities of its tokens too.
    `prompt` is all that is computed before the first token is sampled, where the tail guesses by an MTP head
    and no other member sees it.

    `masked` are tokens that must not occur before the answer has `masked_until` tokens, and `masked_always`
    those that never may (node.engine.penalties); both rise. `stored` is the packed chain of the prompt
    (mesh.ring.prefix_names), for every member; empty where none of its blocks may be stored. `grids` are the
    images of the prompt, rising, for every member of a model that needs them (node.engine.staging.grid).

    `receipt` binds what the tail signs for the answer (mesh.receipt.statement); empty where it signs nothing.
    `position` counts the answer's tokens that were generated in an earlier epoch. `answered` are these
    tokens, for penalties that count them and for a grammar. `grammar` constrains the answer
    (node.engine.grammar). `matcher` is the answer's place in it, at the tail only and not in the record.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_tail: tuple[int, ...] = ()
    position: int = 0
    answered: tuple[int, ...] = ()
    logprobs: int | None = None
    scored: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    masked_until: int = 0
    masked: tuple[int, ...] = ()
    masked_always: tuple[int, ...] = ()
    stored: bytes = b""
    receipt: bytes = b""
    grids: tuple[Grid, ...] = ()
    grammar: str = ""
    matcher: Matcher | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def repeats(self) -> bool:
        """Whether there is a repetition penalty."""
        return self.repetition_penalty != 1

    @property
    def counts(self) -> bool:
        """Whether there is a presence or a frequency penalty."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def masks(self) -> bool:
        """Whether tokens are masked."""
        return bool(self.masked or self.masked_always)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.repeats or self.counts or bool(self.logit_bias)


def from_sampling(
    sampling: inference.Sampling,
    prompt: Sequence[int] = (),
    answered: Sequence[int] = (),
    choice: int = 0,
    grammar: str = "",
    ends: Sequence[int] = (),
    stored: bytes = b"",
    receipt: bytes = b"",
    grids: Sequence[Grid] = (),
) -> RowParameters:
    """The parameters of a validated request; a request without a seed gets a random one.

    `ends` are the tokens that end this model's answers.
    Of the prompt's tokens, and those `answered` before a fault, only those are taken that penalties or the
    grammar ask for.
    """
    size = 0
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1:
        named = sampling.HasField("repetition_context_size")
        size = sampling.repetition_context_size if named else DEFAULT_CONTEXT_SIZE
    seed = sampling.seed if sampling.HasField("seed") else int.from_bytes(os.urandom(8), "little")
    counts = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    stops = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else ends)]
    own = {"seed": (seed + choice) % (1 << 64), "repetition_context_size": size}
    return RowParameters(
        **_given(sampling) | own,
        logit_bias=tuple(sorted((token, bias) for token, bias in sampling.logit_bias.items() if bias)),
        prompt_tail=(*prompt[-size:], *answered)[-size:] if size else (),
        position=len(answered),
        answered=tuple(answered) if counts or grammar else (),
        scored=tuple(prompt) if sampling.prompt_logprobs and not answered else (),
        masked_until=sampling.min_tokens,
        masked=_rising(stops if sampling.min_tokens else ()),
        masked_always=_rising(ends if sampling.ignore_eos else ()),
        stored=stored,
        receipt=receipt,
        grids=tuple(grids),
        grammar=grammar,
    )


def _rising(tokens: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(tokens)))


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RowParameters)}
_PLAIN = tuple(options.PLAIN.keys() & _DEFAULTS.keys())
"""The request's options that the record has as the request has them."""

_TUPLES = ("prompt_tail", "answered", "scored", "masked", "masked_always", "prompt")


def encode(parameters: RowParameters, *, apart: bool = False) -> bytes:
    """The record: a message behind its length, padded with zeros to a multiple of BLOCK bytes.

    With `apart` it is two messages, the first for every member (`parts`), and the padding has room for a
    tag at its end.
    """
    plain: dict[str, Any] = {name: getattr(parameters, name) for name in _PLAIN}
    content = engine.RowParameters(
        sampling=inference.Sampling(**{name: it for name, it in plain.items() if it != _DEFAULTS[name]}),
        bias_tokens=[token for token, _ in parameters.logit_bias],
        biases=[bias for _, bias in parameters.logit_bias],
        position=parameters.position,
        masked_until=parameters.masked_until,
        grammar=parameters.grammar,
        stored=parameters.stored,
        receipt=parameters.receipt,
        grids=[number for grid in parameters.grids for number in grid],
        **{name: getattr(parameters, name) for name in _TUPLES},
    )
    record = b""
    if apart:
        record = _packed(engine.RowParameters(stored=content.stored, grids=content.grids, apart=True))
        content.ClearField("stored")
        content.ClearField("grids")
    record += _packed(content)
    blocks = -(-(len(record) + TAG_BYTES * apart) // BLOCK)
    if parameters.grammar:
        blocks = 1 << (blocks - 1).bit_length()
    return record.ljust(blocks * BLOCK, b"\0")


def decode(record: bytes | memoryview) -> RowParameters:
    """Raises InvalidInput (reason BAD_PARAMETERS) for any record that `encode` does not make."""
    try:
        found = _message(record)
        if apart := found.apart:
            found.MergeFrom(_message(record[len(_first(record)) :]))
        tuples: dict[str, Any] = {name: tuple(getattr(found, name)) for name in _TUPLES}
        parameters = RowParameters(
            **_given(found.sampling) | tuples,
            logit_bias=tuple(zip(found.bias_tokens, found.biases, strict=True)),
            position=found.position,
            masked_until=found.masked_until,
            grammar=found.grammar,
            stored=found.stored,
            receipt=found.receipt,
            grids=_grids(found),
        )
    except ValueError:
        raise _bad("is malformed") from None
    if encode(parameters, apart=apart) != record:
        raise _bad("has a wrong length or padding")
    if not all(check(parameters) for check in _CHECKS):
        raise _bad("holds values out of range")
    return parameters


def chain_in(record: bytes) -> Chain:
    """The chain of the row's prompt, for members that read nothing else of the record.

    Raises InvalidInput (BAD_PARAMETERS, BAD_PREFIXES).
    """
    return Chain.unpack(_message(record).stored)


def grids_in(record: bytes) -> tuple[Grid, ...]:
    """The images of the row's prompt, likewise. Raises InvalidInput (BAD_PARAMETERS)."""
    grids = _grids(_message(record)) if record else ()
    if not possible(grids):
        raise _bad("holds values out of range")
    return grids


def parts(record: bytes) -> tuple[bytes, bytes]:
    """The part of a record for every member, and the rest, which stands apart. Raises InvalidInput
    (BAD_PARAMETERS)."""
    if not _message(record).apart:
        raise _bad("has nothing apart")
    first = _first(record)
    return first, record[len(first) :]


def _first(record: bytes | memoryview) -> bytes:
    """The record's first message, behind its length."""
    try:
        (length,) = _LENGTH.unpack_from(record)
    except struct.error:
        raise _bad("is malformed") from None
    return bytes(record[: _LENGTH.size + length])


def _packed(message: engine.RowParameters) -> bytes:
    content = message.SerializeToString()
    return _LENGTH.pack(len(content)) + content


def _message(record: bytes | memoryview) -> engine.RowParameters:
    try:
        return engine.RowParameters.FromString(_first(record)[_LENGTH.size :])
    except DecodeError:
        raise _bad("is malformed") from None


def _grids(found: engine.RowParameters) -> tuple[Grid, ...]:
    numbers, size = found.grids, len(Grid._fields)
    if len(numbers) % size:
        raise _bad("is malformed")
    return tuple(Grid(*numbers[at : at + size]) for at in range(0, len(numbers), size))


def _given(sampling: inference.Sampling) -> dict[str, Any]:
    """The plain options that are set."""
    return {field.name: value for field, value in sampling.ListFields() if field.name in _PLAIN}


def _in_bounds(row: RowParameters) -> bool:
    """Whether every plain option is off or within its bounds."""
    values = {name: getattr(row, name) for name in _PLAIN if name in options.BOUNDS}
    return all(value == _DEFAULTS[name] or options.BOUNDS[name].hold(value) for name, value in values.items())


_CHECKS: tuple[Callable[[RowParameters], bool], ...] = (
    _in_bounds,
    lambda row: row.repeats == (row.repetition_context_size > 0),
    lambda row: len(row.prompt_tail) <= row.repetition_context_size,
    lambda row: len(row.logit_bias) <= limits.MAX_LOGIT_BIASES,
    lambda row: (
        max(map(max, filter(None, (row.prompt_tail, row.answered, row.scored, row.prompt))), default=0)
        <= limits.MAX_TOKEN_ID
    ),
    lambda row: len(row.answered) == (row.position if row.counts or row.grammar else 0),
    lambda row: len(row.stored) <= MAX_CHAIN_BYTES and len(row.stored) % NAME_BYTES == 0,
    lambda row: len(row.receipt) in (0, HASH_BYTES),
    lambda row: len(row.masked + row.masked_always) <= MAX_MASKED,
    lambda row: all(one < two for each in (row.masked, row.masked_always) for one, two in pairwise(each)),
    lambda row: max(row.masked + row.masked_always, default=0) <= limits.MAX_TOKEN_ID,
    lambda row: possible(row.grids),
    lambda row: not row.scored or (row.logprobs is not None and not row.position),
    lambda row: len(row.scored) * (1 + (row.logprobs or 0)) <= limits.MAX_SCORED,
    lambda row: all(bias and abs(bias) <= limits.MAX_BIAS for _, bias in row.logit_bias),
    lambda row: all(one < two for (one, _), (two, _) in pairwise(row.logit_bias)),
    lambda row: max((token for token, _ in row.logit_bias), default=0) <= limits.MAX_TOKEN_ID,
)


def _bad(why: str) -> InvalidInput:
    return InvalidInput(
        f"a parameter record {why}",
        reason="BAD_PARAMETERS",
        hint="all members of a ring must run the same version",
    )
