"""Sealed prompts and replies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import secrets
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto import pack_fields
from sealring.mesh.errors import EnvelopeError, InvalidInput, RecordError, ResourceExhausted
from sealring.mesh.names import MAX_DEPLOYMENT_NAME, check_deployment_name
from sealring.mesh.prompt.sealed import (
    CLASSIC,
    MAX_CHUNK_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_LIFETIME_SECONDS,
    ReplayGuard,
    ReplyOpener,
    ReplySealer,
    RequestInfo,
    SealingKey,
    seal_request,
)

NOW = 1_800_000_000
SHARED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
KEY = SealingKey()


@pytest.fixture
def guard(clock: Any) -> ReplayGuard:
    return ReplayGuard(clock=clock)


def info(**changes: Any) -> RequestInfo:
    base = RequestInfo("demo", secrets.token_bytes(16), NOW + 60, b"\x07" * 32)
    return dataclasses.replace(base, **changes)


def refusal(action: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(EnvelopeError) as error:
        action(*arguments, **options)
    assert "secret prompt" not in str(error.value)
    return error.value.reason


@pytest.mark.parametrize("hybrid", [False, True])
def test_request_and_reply(guard: ReplayGuard, hybrid: bool) -> None:
    key, request = SealingKey(hybrid=hybrid), info()
    sealed, opener = seal_request(key.public_key, request, b"secret prompt")
    assert b"secret prompt" not in sealed
    opened = key.open_request(sealed, request, guard)
    assert opened.body == b"secret prompt"
    assert len(key.public_key) == (1216 if hybrid else 32)
    chunks = [opened.reply.seal(b"Hel"), opened.reply.seal(b""), opened.reply.seal(b"lo", last=True)]
    assert [opener.open(chunk) for chunk in chunks] == [(b"Hel", False), (b"", False), (b"lo", True)]
    assert refusal(opener.open, chunks[2]) == "REPLY_ENDED"
    assert refusal(opened.reply.seal, b"x") == "REPLY_ENDED"


@pytest.mark.parametrize(
    "changes",
    [
        {"deployment": "other"},
        {"request_id": bytes(16)},
        {"expires": NOW + 61},
        {"roster_hash": bytes(32)},
    ],
)
def test_the_info_is_bound(guard: ReplayGuard, changes: dict[str, Any]) -> None:
    request = info()
    sealed, _ = seal_request(KEY.public_key, request, b"secret prompt")
    assert (
        refusal(KEY.open_request, sealed, dataclasses.replace(request, **changes), guard)
        == "ENVELOPE_REFUSED"
    )
    assert KEY.open_request(sealed, request, guard).body == b"secret prompt"


def test_another_head_cannot_open(guard: ReplayGuard) -> None:
    request = info()
    for hybrid in (False, True):
        sealed, _ = seal_request(KEY.public_key, request, b"secret prompt")
        assert refusal(SealingKey(hybrid=hybrid).open_request, sealed, request, guard) == "ENVELOPE_REFUSED"


@SHARED
@given(place=st.integers(0, 1 << 16), cut=st.integers(0, 200))
def test_any_flipped_bit_or_cut_is_refused(guard: ReplayGuard, place: int, cut: int) -> None:
    request = info()
    sealed, _ = seal_request(KEY.public_key, request, b"secret prompt")
    changed = bytearray(sealed)
    changed[place % (len(sealed) * 8) // 8] ^= 1 << place % 8
    assert refusal(KEY.open_request, bytes(changed), request, guard) == "ENVELOPE_REFUSED"
    assert refusal(KEY.open_request, sealed[: cut % len(sealed)], request, guard) == "ENVELOPE_REFUSED"
    assert refusal(KEY.open_request, sealed + b"\x00", request, guard) == "ENVELOPE_REFUSED"


def test_a_sealed_request_without_a_reply_key_is_refused(guard: ReplayGuard) -> None:
    request = info()
    key = X25519PublicKey.from_public_bytes(KEY.public_key)
    for plain in (
        b"",
        b"x",
        pack_fields(b"short", b"body"),
        pack_fields(bytes(32)),
        pack_fields(bytes(32), b"b"),
    ):
        sealed = CLASSIC.encrypt(plain, key, request.encode())
        assert refusal(KEY.open_request, sealed, request, guard) == "ENVELOPE_REFUSED"


def test_times(guard: ReplayGuard, clock: Any) -> None:
    longest = NOW + MAX_LIFETIME_SECONDS + SKEW_SECONDS
    for expires, fits in ((NOW, False), (NOW + 1, True), (longest, True), (longest + 1, False)):
        request = info(expires=expires)
        sealed, _ = seal_request(KEY.public_key, request, b"x")
        if fits:
            KEY.open_request(sealed, request, guard)
        else:
            assert refusal(KEY.open_request, sealed, request, guard) == "ENVELOPE_EXPIRED"


def test_a_clock_moved_back_revives_nothing_that_was_forgotten(clock: Any) -> None:
    guard = ReplayGuard(capacity=1, clock=clock)
    first, second = info(expires=NOW + 10), info(expires=NOW + 100)
    sealed, following = (seal_request(KEY.public_key, one, b"x")[0] for one in (first, second))
    KEY.open_request(sealed, first, guard)
    clock.advance(10)
    KEY.open_request(following, second, guard)
    clock.advance(-10)
    assert refusal(KEY.open_request, sealed, first, guard) == "ENVELOPE_EXPIRED"
    guard.check_times(info(expires=NOW + 11))


def test_a_clock_that_was_ahead_is_not_remembered(guard: ReplayGuard, clock: Any) -> None:
    request = info()
    sealed, _ = seal_request(KEY.public_key, request, b"x")
    clock.advance(3600)
    assert refusal(KEY.open_request, sealed, request, guard) == "ENVELOPE_EXPIRED"
    clock.advance(-3600)
    KEY.open_request(sealed, request, guard)


def test_ids_that_were_forgotten_by_a_clock_ahead_bar_none_of_the_right_time(
    guard: ReplayGuard, clock: Any
) -> None:
    for wait in (0, *[10] * 40, 3600, *[10] * 40):
        clock.advance(wait)
        claim(guard, "", expires=int(clock.now) + 60)
    clock.advance(-3600)
    guard.check_times(info(expires=int(clock.now) + 60))


@SHARED
@given(moves=st.lists(st.tuples(st.integers(-4000, 4000), st.integers(1, 360)), max_size=40))
def test_no_clock_has_an_id_taken_twice(moves: list[tuple[int, int]]) -> None:
    now = [NOW]
    guard = ReplayGuard(clock=lambda: now[0])
    taken: list[RequestInfo] = []
    for ahead, lifetime in moves:
        now[0] += ahead
        request = info(expires=now[0] + lifetime)
        with contextlib.suppress(EnvelopeError):
            guard.check_times(request)
            guard.claim(request, bytes(32), 1)
            taken.append(request)
        for each in taken:
            with pytest.raises(EnvelopeError):
                guard.check_times(each)
                guard.claim(each, bytes(32), 1)


def test_request_ids_are_single_use_within_an_epoch(guard: ReplayGuard) -> None:
    request = info()
    sealed, opener = seal_request(KEY.public_key, request, b"x")
    KEY.open_request(sealed, request, guard, epoch=3)
    for epoch in (3, 2, 0):
        assert refusal(KEY.open_request, sealed, request, guard, epoch=epoch) == "ENVELOPE_REPLAYED"
    other, _ = seal_request(KEY.public_key, request, b"y")
    assert refusal(KEY.open_request, other, request, guard, epoch=4) == "ENVELOPE_REPLAYED"
    again = KEY.open_request(sealed, request, guard, epoch=4)
    assert opener.open(again.reply.seal(b"whole", last=True)) == (b"whole", True)


def claim(guard: ReplayGuard, client: str, *, expires: int = NOW + 100) -> Any:
    """Takes an id for a client; what gives it back."""
    return guard.claim(info(expires=expires, request_id=secrets.token_bytes(16)), bytes(32), 1, client)


def test_the_guard_is_bounded_and_refuses_rather_than_forgets(clock: Any) -> None:
    guard = ReplayGuard(capacity=4, clock=clock)
    first, second = info(expires=NOW + 10), info(expires=NOW + 100)
    guard.claim(first, b"a", 1)
    guard.claim(second, b"b", 1)
    for _ in range(2):
        with pytest.raises(ResourceExhausted):
            claim(guard, "")
    clock.advance(10)
    claim(guard, "")
    with refused("ENVELOPE_REPLAYED", EnvelopeError):
        guard.claim(second, b"b", 1)


def test_a_client_who_floods_the_guard_leaves_room_for_any_other(clock: Any) -> None:
    guard = ReplayGuard(capacity=64, clock=clock)
    for client in ("greedy", "greedy too"):
        with pytest.raises(ResourceExhausted):
            for _ in range(65):
                claim(guard, client)
    for _ in range(5):
        claim(guard, "modest")
    clock.advance(100)
    for _ in range(32):  # each forgets some that have expired
        claim(guard, "greedy", expires=NOW + 200)


def test_an_id_that_is_given_back_is_as_it_was_before(clock: Any) -> None:
    guard = ReplayGuard(capacity=2, clock=clock)
    request = info()
    for _ in range(3):
        guard.claim(request, b"a", 1, "client")()  # refused by the engine, again and again
    undo = guard.claim(request, b"a", 1, "client")
    with pytest.raises(ResourceExhausted):
        claim(guard, "client")
    guard.claim(request, b"a", 2, "client")()
    for epoch in (1, 0):
        with pytest.raises(EnvelopeError):
            guard.claim(request, b"a", epoch, "client")
    guard.claim(request, b"a", 2, "client")
    undo()  # too late: a later epoch has it
    with pytest.raises(EnvelopeError):
        guard.claim(request, b"a", 2, "client")


def test_a_refused_request_uses_up_nothing(guard: ReplayGuard) -> None:
    request = info()
    sealed, _ = seal_request(KEY.public_key, request, b"x")
    assert refusal(KEY.open_request, sealed + b"\x00", request, guard) == "ENVELOPE_REFUSED"
    KEY.open_request(sealed, request, guard)


def reply_pair(guard: ReplayGuard) -> tuple[Any, Any]:
    request = info()
    sealed, opener = seal_request(KEY.public_key, request, b"x")
    return KEY.open_request(sealed, request, guard).reply, opener


def test_a_plaintext_reply_is_a_hard_error(guard: ReplayGuard) -> None:
    for plain in (
        b"",
        b"Hello",
        b'{"text": "a long enough plaintext reply to fill the opening and the tag"}' * 9,
    ):
        _, opener = reply_pair(guard)
        assert refusal(opener.open, plain) == "ENVELOPE_REFUSED"
        assert refusal(opener.open, plain) == "REPLY_ENDED"


def test_reply_chunks_reordered_repeated_dropped_or_crossed(guard: ReplayGuard) -> None:
    for order in ((1,), (0, 0), (0, 2), (0, 2, 1)):
        sealer, opener = reply_pair(guard)
        chunks = [sealer.seal(bytes([n])) for n in range(3)]
        with pytest.raises(EnvelopeError):
            for index in order:
                opener.open(chunks[index])
        assert refusal(opener.open, chunks[1]) == "REPLY_ENDED"
    sealer, opener = reply_pair(guard)
    other, _ = reply_pair(guard)
    assert refusal(opener.open, other.seal(b"x")) == "ENVELOPE_REFUSED"
    _, opener = reply_pair(guard)
    first = sealer.seal(b"x")
    assert refusal(opener.open, first) == "ENVELOPE_REFUSED"


def test_a_reply_cut_short_is_not_complete(guard: ReplayGuard) -> None:
    sealer, opener = reply_pair(guard)
    assert opener.open(sealer.seal(b"x")) == (b"x", False)
    sealer, opener = reply_pair(guard)
    sealed = sealer.seal(b"x", last=True)
    assert refusal(opener.open, sealed[:-1]) == "ENVELOPE_REFUSED"


@pytest.mark.parametrize("plain", [b"\x02x", b""])
def test_a_chunk_whose_kind_is_unknown_is_refused(plain: bytes) -> None:
    """Sealed by hand, with the right key under the right number."""
    key, stream_key, request = X25519PrivateKey.generate(), bytes(32), info()
    bound = pack_fields(b"sealring/v1 reply", request.encode(), bytes(32))
    opening = CLASSIC.encrypt(stream_key, key.public_key(), bound)
    for chunk, expected in ((b"\x00x", None), (plain, "ENVELOPE_REFUSED")):
        sealed = opening + ChaCha20Poly1305(stream_key).encrypt(bytes(12), chunk, bound)
        opener = ReplyOpener(key, request, bytes(32))
        if expected is None:
            assert opener.open(sealed) == (b"x", False)
        else:
            assert refusal(opener.open, sealed) == expected


def test_bounds(guard: ReplayGuard) -> None:
    with pytest.raises(InvalidInput):
        seal_request(KEY.public_key, info(), bytes(MAX_ENVELOPE_BYTES))
    largest, _ = seal_request(KEY.public_key, request := info(), bytes(MAX_ENVELOPE_BYTES - 4096))
    KEY.open_request(largest, request, guard)
    assert refusal(KEY.open_request, bytes(MAX_ENVELOPE_BYTES + 1), info(), guard) == "ENVELOPE_TOO_LARGE"
    assert refusal(KEY.open_request, bytes(MAX_ENVELOPE_BYTES), info(), guard) == "ENVELOPE_REFUSED"
    longest = "x" * MAX_DEPLOYMENT_NAME
    assert info(deployment=check_deployment_name(longest)).encode()
    assert info(deployment="x").encode()
    assert info(expires=1).encode()
    ReplayGuard(clock=lambda: 0.0).check_times(info(expires=1))
    with pytest.raises(InvalidInput):
        info(deployment=longest + "x")
    sealer, opener = reply_pair(guard)
    assert refusal(sealer.seal, bytes(MAX_CHUNK_BYTES + 1)) == "CHUNK_TOO_LARGE"
    assert opener.open(sealer.seal(bytes(MAX_CHUNK_BYTES)))[0] == bytes(MAX_CHUNK_BYTES)
    head = 32 + 32 + 16  # a key, a sealed key and its tag
    assert refusal(reply_pair(guard)[1].open, bytes(MAX_CHUNK_BYTES + head + 18)) == "CHUNK_TOO_LARGE"
    assert refusal(reply_pair(guard)[1].open, bytes(MAX_CHUNK_BYTES + head + 17)) == "ENVELOPE_REFUSED"
    for key in (b"", bytes(31), bytes(33), bytes(1216 - 1), b"\xff" * 1216):
        with pytest.raises(InvalidInput):
            seal_request(key, info(), b"x")
    for changes in (
        {"deployment": ""},
        {"deployment": "x" * (MAX_DEPLOYMENT_NAME + 1)},
        {"request_id": bytes(15)},
        {"expires": 0},
        {"expires": 1 << 62},
        {"roster_hash": bytes(31)},
    ):
        with pytest.raises(InvalidInput):
            info(**changes)


def test_keys_and_replies_cannot_be_copied(guard: ReplayGuard) -> None:
    sealer, opener = reply_pair(guard)
    for thing in (SealingKey(), sealer, opener):
        for action in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(RecordError):
                action(thing)
    assert repr(SealingKey(hybrid=True)) == "SealingKey(hybrid=True)"


def test_a_low_order_reply_key_is_refused() -> None:
    for key in (bytes(32), b"\x01" + bytes(31), bytes(5)):
        assert refusal(ReplySealer, key, info(), bytes(32)) == "ENVELOPE_REFUSED"


def test_a_key_is_x25519_and_an_epoch_the_first_where_nothing_else_is_said(guard: ReplayGuard) -> None:
    key = SealingKey()
    assert len(key.public_key) == 32
    bound = info()
    sealed, _ = seal_request(key.public_key, bound, b"secret prompt")
    key.open_request(sealed, bound, guard)
    assert refusal(key.open_request, sealed, bound, guard, epoch=0) == "ENVELOPE_REPLAYED"
    assert key.open_request(sealed, bound, guard, epoch=1).body == b"secret prompt"
