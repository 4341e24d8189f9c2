from __future__ import annotations

from types import SimpleNamespace

import pytest

from sealring.coordinator.auth.nonces import Attempts, Nonces
from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.trust.attestation import NONCE_BYTES
from sealring.testing import ManualClock


def test_a_nonce_is_good_once_for_a_while_and_only_where_it_was_made() -> None:
    clock = ManualClock()
    nonces = Nonces(lifetime=60, clock=clock)
    first, second = nonces.issue(), nonces.issue()
    assert first != second
    assert len(first) == NONCE_BYTES
    assert not Nonces(lifetime=60, clock=clock).use(first)
    clock.now = 59
    assert nonces.use(first)
    assert not nonces.use(first)
    clock.now = 60
    assert not nonces.use(second)


def test_a_nonce_with_any_bit_changed_is_none() -> None:
    nonces = Nonces(lifetime=60, clock=ManualClock())
    nonce = nonces.issue()
    for index in range(NONCE_BYTES):
        assert not nonces.use(nonce[:index] + bytes([nonce[index] ^ 1]) + nonce[index + 1 :])
    for wrong in (b"", nonce[:-1], nonce + b"\x00", bytes(NONCE_BYTES)):
        assert not nonces.use(wrong)


def test_whoever_takes_nonces_takes_them_from_nobody() -> None:
    """A stranger may take any number: the next caller's nonce is as good."""
    nonces = Nonces(lifetime=60, clock=ManualClock())
    first = nonces.issue()
    for _ in range(5000):
        nonces.issue()
    assert nonces.use(first)
    assert nonces.use(nonces.issue())


def test_what_was_used_is_good_no_more_though_only_the_newest_are_remembered() -> None:
    clock = ManualClock()
    nonces = Nonces(lifetime=60, clock=clock)

    def issue() -> bytes:
        clock.now += 0.001
        return nonces.issue()

    issued = [issue() for _ in range(5000)]
    open_one = issued.pop(10)
    assert all(nonces.use(nonce) for nonce in issued)
    assert not any(nonces.use(nonce) for nonce in issued)
    assert not nonces.use(open_one), "it is as old as nonces whose use was forgotten"
    assert nonces.use(issue())


def test_so_many_attempts_of_a_network_are_let_in_at_once_and_a_second() -> None:
    clock = ManualClock()
    attempts = Attempts(lifetime=60, clock=clock)
    caller = SimpleNamespace(peer=lambda: "ipv4:192.0.2.1:5")

    def admitted() -> int:
        for count in range(1000):
            try:
                attempts.admit(caller)
            except ResourceExhausted:
                return count
        raise AssertionError("there is no limit")

    assert admitted() == 200
    clock.now = 1.0
    assert admitted() == 10
    assert admitted() == 0
    with pytest.raises(ResourceExhausted) as caught:
        attempts.begin(caller)
    assert caught.value.reason == "RATE_LIMITED"
    nonce = attempts.begin(SimpleNamespace(peer=lambda: "ipv4:198.51.100.1:5")).nonce
    assert attempts.use(nonce)
    assert not attempts.use(nonce)
