"""Quotas of tokens a day, with requests under way."""

from __future__ import annotations

import datetime
from collections import Counter
from contextlib import ExitStack, suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sealring.edge.access.quota import CUT_OFF_SECONDS, Quotas
from sealring.mesh.errors import ResourceExhausted, Unavailable

NOW = datetime.datetime(2026, 11, 30, 21, 30).timestamp()


def test_a_key_has_so_many_tokens_a_day() -> None:
    quota, spent, refusals = {"laptop": 1000}, {"laptop": 999}, list[str]()
    quotas = Quotas(lambda key: quota.get(key, 0), spent.__getitem__, refusals.append, lambda: NOW)
    with quotas.claim("laptop", lambda: 10**6):
        pass
    spent["laptop"] = 1000
    with pytest.raises(ResourceExhausted) as caught, quotas.claim("laptop", lambda: 1):
        pass
    assert caught.value.reason == "DAILY_TOKENS_USED"
    assert "has used its 1,000 tokens of today" in caught.value.message
    assert "2026-12-01 00:00" in caught.value.hint
    assert caught.value.metadata["retry_after"] == str(2 * 3600 + 1800)
    assert refusals == ["DAILY_TOKENS_USED"]
    with quotas.claim("other", lambda: 10**9):
        pass
    for quota["laptop"] in (2000, 0):
        with quotas.claim("laptop", lambda: 1):
            pass


def test_what_may_be_used_counts_until_it_is_known() -> None:
    quotas = Quotas(lambda key: 1000, lambda key: 0)
    with quotas.claim("laptop", lambda: 600), quotas.claim("laptop", lambda: 600):
        with quotas.claim("phone", lambda: 1):
            pass
        with pytest.raises(ResourceExhausted) as caught, quotas.claim("laptop", lambda: 1):
            pass
        assert (caught.value.reason, caught.value.metadata["retry_after"]) == ("TOO_MANY_AT_ONCE", "1")
    assert not quotas.claimed


def test_the_rest_of_an_answer_that_was_cut_off_is_not_refused() -> None:
    """Once for each answer, for a while, and not by the client's word alone."""
    spent, now = {"laptop": 0}, NOW
    quotas = Quotas(lambda key: 1000, spent.__getitem__, clock=lambda: now)

    def refused(**asked: bool) -> bool:
        with suppress(ResourceExhausted), quotas.claim("laptop", lambda: 700, **asked):
            return False
        return True

    def cut_off(answers: int, **asked: bool) -> None:
        with quotas.claim("laptop", lambda: 700, **asked) as claim:
            claim.rests = answers

    cut_off(2)
    spent["laptop"] = 1000
    assert refused()
    with quotas.claim("laptop", lambda: 700, goes_on=True):
        assert quotas.claimed["laptop"] == 700  # and no token has come: it may be asked for again
    cut_off(0, goes_on=True)
    cut_off(1, goes_on=True)
    cut_off(0, goes_on=True)
    assert refused(goes_on=True)
    spent["laptop"] = 0
    cut_off(1)
    spent["laptop"], now = 1000, NOW + CUT_OFF_SECONDS
    assert refused(goes_on=True)
    assert not quotas.claimed


class AtOnce(RuleBasedStateMachine):
    """Requests of two keys that begin, end, fail, leave and are refused in any order."""

    QUOTA = 1000

    def __init__(self) -> None:
        super().__init__()
        self.spent = Counter[str]()
        self.under_way: list[tuple[str, int, ExitStack]] = []
        self.largest = Counter[str]()
        self.quotas = Quotas(lambda key: self.QUOTA, self.spent.__getitem__)

    @rule(key=st.sampled_from("ab"), most=st.integers(1, 700))
    def begin(self, key: str, most: int) -> None:
        counted = self.spent[key] + sum(size for name, size, _ in self.under_way if name == key)
        claim = ExitStack()
        if counted >= self.QUOTA:
            with pytest.raises(ResourceExhausted) as caught:
                claim.enter_context(self.quotas.claim(key, lambda: most))
            used_up = self.spent[key] >= self.QUOTA
            assert caught.value.reason == ("DAILY_TOKENS_USED" if used_up else "TOO_MANY_AT_ONCE")
        else:
            claim.enter_context(self.quotas.claim(key, lambda: most))
            self.under_way.append((key, most, claim))
            self.largest[key] = max(self.largest[key], most)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        """What it used counts before its claim ends; an error, or a client that left, passes through."""
        key, most, claim = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.spent[key] += data.draw(st.integers(0, most))
        error = Unavailable("its ring is gone", reason="RING_GONE") if fails else None
        assert not claim.__exit__(type(error) if error else None, error, None)

    @rule()
    def midnight(self) -> None:
        self.spent.clear()
        self.largest = Counter({key: max([0, *self._sizes(key)]) for key in "ab"})

    def _sizes(self, key: str) -> list[int]:
        return [size for name, size, _ in self.under_way if name == key]

    @invariant()
    def what_is_claimed_is_what_is_under_way(self) -> None:
        assert self.quotas.claimed == {key: sum(sizes) for key in "ab" if (sizes := self._sizes(key))}

    @invariant()
    def a_quota_is_passed_by_one_request_at_most(self) -> None:
        for key in "ab":
            assert self.spent[key] < self.QUOTA + max(self.largest[key], 1)

    def teardown(self) -> None:
        for _, _, claim in self.under_way:
            claim.close()
        assert not self.quotas.claimed


TestAtOnce = AtOnce.TestCase
