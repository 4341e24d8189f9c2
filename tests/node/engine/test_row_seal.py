"""Parameters of rows reach the tail as the head has sealed them, or not at all."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stagering import CHUNK, ROW_KEY, Prompts, Ring, stages_of
from tailgateway import Between, Gateway

from sealring.mesh.crypto import Suite
from sealring.mesh.errors import InvalidInput, RecordError, SealringError
from sealring.mesh.ring import Chain
from sealring.node.engine import RowParameters, RowSeal, params
from sealring.node.engine.params import BLOCK
from sealring.node.engine.staging.grid import Grid
from sealring.node.wire.channel import Kind, RecordHeader

FOR_ALL = {"stored": bytes([255] * 32), "grids": (Grid(3, 1, 4, 5),)}
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=400).map(tuple)


def place(step: int = 1, row: int = 1, digest: bytes = bytes(32)) -> Any:
    return SimpleNamespace(number=step, digest=digest), SimpleNamespace(row=row)


def ends(key: bytes = ROW_KEY) -> tuple[RowSeal, RowSeal]:
    head, tail = RowSeal(seals=True), RowSeal(seals=False)
    for one in (head, tail):
        one.take(key)
    return head, tail


def pairs(tokens: Sequence[int]) -> list[bytes]:
    """Two tokens that follow each other, as records have them."""
    return [b"".join(token.to_bytes(4, "little") for token in both) for both in pairwise(tokens)]


def refusal(tail: RowSeal, record: bytes, at: Any) -> str:
    with pytest.raises(SealringError) as caught:
        tail.cross(*at, record)
    return caught.value.reason


@given(TOKENS, st.sampled_from(Suite), st.booleans())
def test_the_tail_gets_what_the_head_has_sealed_and_no_record_is_longer(
    tokens: tuple[int, ...], suite: Suite, told: bool
) -> None:
    row = RowParameters(prompt=tokens, **FOR_ALL if told else {})
    record = params.encode(row, apart=True)
    head, tail = ends(bytes([suite.code]) + bytes(32))
    sealed = head.cross(*place(), record)
    assert params.decode(tail.cross(*place(), sealed)) == row
    assert len(sealed) == len(record)
    assert len(record) % BLOCK == 0
    assert 0 <= len(record) - len(params.encode(row)) <= BLOCK


@given(st.lists(st.integers(1 << 16, 2**31 - 1), min_size=2, max_size=60).map(tuple), st.integers(0, 99))
def test_members_in_between_read_what_is_for_them_and_nothing_else(
    tokens: tuple[int, ...], seed: int
) -> None:
    """Wherever a record has tokens or words."""
    row = RowParameters(
        repetition_penalty=1.5,
        repetition_context_size=60,
        presence_penalty=1.0,
        prompt_tail=tokens,
        answered=tokens,
        position=len(tokens),
        prompt=tokens,
        logit_bias=((tokens[0], 1.0),),
        masked=(tokens[-1],),
        grammar="start: /secret/",
        seed=seed,
        receipt=bytes([9] * 32),
        **FOR_ALL,
    )
    record = params.encode(row, apart=True)
    sealed = ends()[0].cross(*place(), record)
    assert params.grids_in(sealed) == FOR_ALL["grids"]
    assert params.chain_in(sealed) == Chain.unpack(row.stored)
    for secret in (b"/secret/", row.receipt, *pairs(tokens)):
        assert secret in record
        assert secret not in sealed
    other = params.encode(RowParameters(prompt=tokens[::-1], **FOR_ALL), apart=True)
    assert params.parts(other)[0] == params.parts(sealed)[0]


@given(st.integers(0, BLOCK * 8 - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    head, tail = ends()
    sealed = bytearray(head.cross(*place(), params.encode(RowParameters(prompt=(7,), **FOR_ALL), apart=True)))
    assert len(sealed) == BLOCK
    sealed[bit // 8] ^= 1 << bit % 8
    assert refusal(tail, bytes(sealed), place()) in ("RECORD_REFUSED", "BAD_PARAMETERS")


@given(st.permutations(range(4)), st.integers(0, 3))
def test_only_the_order_of_sealing_opens(order: list[int], replayed: int) -> None:
    """A member in between may keep, drop, swap or repeat records, also of equal rows."""
    head, tail = ends()
    record = params.encode(RowParameters(), apart=True)
    sealed = [head.cross(*place(row=row), record) for row in range(4)]
    assert len(set(sealed)) == 4
    for turn, chosen in enumerate([*order[:3], replayed]):
        if chosen == turn:
            assert tail.cross(*place(row=turn), sealed[chosen]) == record
        else:
            assert refusal(tail, sealed[chosen], place(row=turn)) == "RECORD_REFUSED"
            break


@pytest.mark.parametrize("other", [{"step": 2}, {"row": 2}, {"digest": bytes([1] * 32)}])
def test_a_record_is_of_one_row_step_and_composition(other: dict[str, Any]) -> None:
    head, tail = ends()
    sealed = head.cross(*place(), params.encode(RowParameters(), apart=True))
    assert refusal(tail, sealed, place(**other)) == "RECORD_REFUSED"


def test_a_record_of_another_epoch_or_of_nobodys_sealing_is_refused() -> None:
    """The key is of one epoch; a record in clear is what a ring without the seal sends."""
    record = params.encode(RowParameters(), apart=True)
    for forged in (
        ends(ROW_KEY[:1] + bytes(32))[0].cross(*place(), record),
        record,
        record[:20],
        ends()[0].cross(*place(), record)[:-1],
    ):
        assert refusal(ends()[1], forged, place()) == "RECORD_REFUSED"
    for malformed in (params.encode(RowParameters()), b"", b"\xff" * BLOCK):
        assert refusal(ends()[1], malformed, place()) == "BAD_PARAMETERS"


def test_nothing_is_sealed_without_a_key_or_in_a_form_that_shows_everything() -> None:
    record = params.encode(RowParameters(prompt=(1, 2)), apart=True)
    with pytest.raises(RecordError) as caught:
        RowSeal(seals=True).cross(*place(), record)
    assert caught.value.reason == "NO_ROW_KEY"
    head, _ = ends()
    with pytest.raises(InvalidInput):
        head.cross(*place(), params.encode(RowParameters(prompt=(1, 2))))
    head.take(ROW_KEY[:1] + bytes(32))  # a second key does not begin the count anew
    assert ends()[1].cross(*place(), ends()[0].cross(*place(), record)) == record
    with pytest.raises(RecordError):
        copy.copy(head)


# A member in between on a ring


def attacked(size: int, change: Any, edge: int) -> Ring:
    """A ring of which a member changes the records of parameters on its way out, after two rows."""
    chance = random.Random(5)
    texts = {row: [chance.randrange(300) for _ in range(CHUNK)] for row in (1, 2)}
    prompts = Prompts({row: (text, RowParameters(prompt=tuple(text))) for row, text in texts.items()})
    ring = Ring(stages_of("qwen3", size), prompts)
    ring.links[edge].records = Between(change)
    gateway = Gateway(ring, asked=False)
    try:
        for row in texts:
            gateway.prefill(row)
    except AssertionError:
        assert ring.faults
    finally:
        ring.close()
    return ring


class Replays:
    """Sends the first row's record again in the place of the second's."""

    def __init__(self) -> None:
        self._first = b""

    def __call__(self, header: RecordHeader, data: bytes) -> bytes:
        if header.kind != Kind.SAMPLING:
            return data
        self._first = self._first or data
        return self._first


def reseeds(header: RecordHeader, data: bytes) -> bytes:
    """Puts parameters of its own in the place of the head's, with which it could choose what is sampled."""
    if header.kind != Kind.SAMPLING:
        return data
    return params.encode(RowParameters(logit_bias=((5, 100.0),)), apart=True).ljust(len(data), b"\0")[
        : len(data)
    ]


def renames(header: RecordHeader, data: bytes) -> bytes:
    """Has the tail alone store the prompt's blocks under names of another prompt."""
    if header.kind != Kind.SAMPLING:
        return data
    own = params.parts(params.encode(RowParameters(stored=bytes([7] * 16)), apart=True))[0]
    return (own + params.parts(data)[1])[: len(data)]


@pytest.mark.parametrize("change", [Replays(), reseeds, renames])
@pytest.mark.parametrize(("size", "edge"), [(3, 1), (3, 0)])
def test_a_member_in_between_ends_the_epoch_and_gains_nothing(change: Any, size: int, edge: int) -> None:
    ring = attacked(size, change() if isinstance(change, type) else change, edge)
    assert {getattr(fault, "reason", "") for fault in ring.faults} == {"RECORD_REFUSED"}
    assert len(ring.faults) == 1


def test_no_record_of_parameters_between_them_has_a_token() -> None:
    seen: list[bytes] = []

    def looks(header: RecordHeader, data: bytes) -> bytes:
        seen.extend([data] * (header.kind == Kind.SAMPLING))
        return data

    ring = attacked(3, looks, 0)
    assert not ring.faults
    assert len(seen) == 2
    for row, data in enumerate(seen, 1):
        for both in pairs(ring.prompts.prompt(row).tolist()):
            assert both in ring.prompts.parameters(row)
            assert both not in data
