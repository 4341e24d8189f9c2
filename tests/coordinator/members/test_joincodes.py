"""The join code's book: five wrong codes at most are compared, and after three one a minute."""

from __future__ import annotations

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from refusals import refused

from sealring.coordinator.members.joincodes import MAX_WRONG, WAIT_SECONDS, WRONG_AT_ONCE, JoinCodes
from sealring.coordinator.members.tokens import JoinTokens
from sealring.coordinator.store import Store
from sealring.mesh.crypto import Agreed, Party
from sealring.mesh.errors import ConfigError, SealringError, Unavailable
from sealring.mesh.member import JoinToken, begin, open_token

PIN = bytes(range(32))


class Bed:
    """Join codes over a real store, with a clock that a test moves."""

    def __init__(self, folder: Path, store: Store | None = None, now: float = 1_800_000_000) -> None:
        self.folder, self.now = folder, now
        self.store = store or Store.create(folder)
        tokens = JoinTokens(self.store, PIN, lambda: ["10.0.0.1:7701"])
        self.codes = JoinCodes(self.store, tokens, PIN, clock=lambda: self.now)

    def restarted(self) -> Bed:
        self.store.close()
        return Bed(self.folder, Store.open(self.folder), self.now)

    def attempt(self, code: str) -> JoinToken:
        """All that a caller with this code does."""
        caller = begin(Party.A, code, PIN)
        attempt = self.codes.begin(caller.share)
        agreed: Agreed = caller.finish(attempt.share)
        answer = self.codes.finish(attempt, agreed.own_confirmation)
        assert agreed.confirmed_by(answer.confirmation)
        return open_token(agreed.key, answer.sealed)


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def other(code: str) -> str:
    return f"{(int(code) + 1) % 10_000_000:07}"


def test_a_code_ends_with_its_time_its_successor_and_its_revocation(bed: Bed) -> None:
    first = bed.codes.create("me", seconds=600, uses=9).code
    pending = bed.codes.begin(begin(Party.A, first, PIN).share)
    second = bed.codes.create("me", seconds=600, uses=9).code
    with refused("NO_CODE"):
        bed.codes.finish(pending, bytes(32))  # the new code loses no try by it
    current = bed.codes.current()
    assert current is not None
    assert current.wrong == 0
    bed.now += 600
    with refused("NO_CODE"):
        bed.attempt(second)
    third = bed.codes.create("me", seconds=600, uses=9).code
    bed.codes.revoke("me")
    with refused("NO_CODE"):
        bed.attempt(third)


def test_a_right_code_costs_no_try_and_gives_none_back(bed: Bed) -> None:
    code = bed.codes.create("me", seconds=3600, uses=9).code
    for wrong in range(1, MAX_WRONG):
        with refused("WRONG_CODE"):
            bed.attempt(other(code))
        bed.now += WAIT_SECONDS
        bed.attempt(code)
        current = bed.codes.current()
        assert current is not None
        assert current.wrong == wrong
    with refused("WRONG_CODE"):
        bed.attempt(other(code))
    bed.now += WAIT_SECONDS
    with refused("NO_CODE"):
        bed.attempt(code)


def test_of_exchanges_begun_together_three_may_be_wrong(bed: Bed) -> None:
    code = bed.codes.create("me", seconds=600, uses=9).code
    begun = []
    for guess in range(20):
        caller = begin(Party.A, f"{guess:07}", PIN)
        attempt = bed.codes.begin(caller.share)
        begun.append((attempt, caller.finish(attempt.share).own_confirmation))
    said = []
    for attempt, confirmation in begun:
        with pytest.raises(SealringError) as caught:
            bed.codes.finish(attempt, confirmation)
        said.append(caught.value.reason)
    assert said == ["WRONG_CODE"] * WRONG_AT_ONCE + ["CODE_WAIT"] * (20 - WRONG_AT_ONCE), (
        f"the code was {code}"
    )


def test_where_the_try_cannot_be_stored_no_code_is_compared(bed: Bed) -> None:
    code = bed.codes.create("me", seconds=600, uses=9).code
    with bed.store.transaction() as connection:
        connection.execute("PRAGMA query_only = ON")
    for guess in code, other(code):
        with refused("STATE_UNWRITABLE", Unavailable):
            bed.attempt(guess)
    bed.restarted().attempt(code)


def test_a_damaged_code_is_reported(bed: Bed) -> None:
    bed.codes.create("me", seconds=600, uses=1)
    with bed.store.transaction() as connection:
        connection.execute("UPDATE messages SET message = x'ff' WHERE kind = 'join code'")
    with refused("STATE_CORRUPT", ConfigError):
        bed.codes.current()


class Guessing(RuleBasedStateMachine):
    """An attacker, a person who types right or wrong, time, and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.bed = Bed(self.folder)
        self.code = ""
        self.compared: list[float] = []

    @rule(uses=st.integers(1, 3), seconds=st.integers(1, 3600))
    def create(self, uses: int, seconds: int) -> None:
        self.code = self.bed.codes.create("me", seconds=seconds, uses=uses).code
        self.compared = []
        self.left, self.ends = uses, self.bed.now + seconds

    @precondition(lambda self: self.code)
    @rule(right=st.booleans())
    def attempt(self, right: bool) -> None:
        open_still = self.left > 0 and self.bed.now < self.ends and len(self.compared) < MAX_WRONG
        waiting = len(self.compared) >= WRONG_AT_ONCE and self.bed.now < self.compared[-1] + WAIT_SECONDS
        typed = self.code if right else other(self.code)
        if right and open_still and not waiting:
            assert self.bed.attempt(typed).root_sha256 == PIN
            self.left -= 1
            return
        reason = "NO_CODE" if not open_still else "CODE_WAIT" if waiting else "WRONG_CODE"
        with pytest.raises(SealringError) as caught:
            self.bed.attempt(typed)
        told, wait = caught.value.metadata, len(self.compared) + 1 in range(WRONG_AT_ONCE, MAX_WRONG)
        assert caught.value.reason == reason
        if reason == "WRONG_CODE":
            assert told.get("retry_after", "") == (str(WAIT_SECONDS) if wait else "")
            assert told["tries_left"] == str(MAX_WRONG - len(self.compared) - 1)
        elif reason == "CODE_WAIT":
            assert 0 <= self.compared[-1] + WAIT_SECONDS + 1 - self.bed.now - int(told["retry_after"]) <= 1
        if reason == "WRONG_CODE":
            self.compared.append(self.bed.now)

    @rule(seconds=st.integers(0, 200))
    def wait(self, seconds: int) -> None:
        self.bed.now += seconds

    @rule()
    def restart(self) -> None:
        self.bed = self.bed.restarted()

    @invariant()
    def few_codes_are_compared_and_far_apart(self) -> None:
        assert len(self.compared) <= MAX_WRONG
        later = self.compared[WRONG_AT_ONCE - 1 :]
        assert all(b - a >= WAIT_SECONDS for a, b in pairwise(later))

    def teardown(self) -> None:
        self.bed.store.close()
        shutil.rmtree(self.folder)


Guessing.TestCase.settings = settings(max_examples=8, stateful_step_count=20)
TestGuessing = Guessing.TestCase


def test_the_code_is_no_part_of_what_is_shown(bed: Bed) -> None:
    """A fault's trace shows attempts and stored codes."""
    stored = bed.codes.create("me", seconds=600, uses=1)
    attempt = bed.codes.begin(begin(Party.A, stored.code, PIN).share)
    assert stored.code not in repr(attempt)
    assert stored.code not in repr(stored)
