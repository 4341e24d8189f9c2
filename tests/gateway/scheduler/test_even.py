"""How many tokens go into every round, by what rounds are seen to take."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.gateway.scheduler.even import EvenShare, most_take


def rounds(share: EvenShare, count: int, fixed: float, each: float, *, lanes: int = 3) -> list[int]:
    """Lets so many rounds pass that may be longer by 1; returns their tokens."""
    given_tokens = []
    for number in range(count):
        tokens = share.more if number % 32 == 31 and share.tokens and not share.trying else share.tokens
        given_tokens.append(tokens)
        for _ in range(lanes if tokens else 0):
            share.measure(tokens, fixed + each * tokens, 1.0, 0.0)
    return given_tokens


@settings(deadline=None, max_examples=200)
@given(
    fixed=st.floats(0.0, 0.8),
    each=st.floats(0.001, 0.15),
    first=st.integers(1, 64),
    lanes=st.integers(1, 8),
)
def test_as_many_as_fit(fixed: float, each: float, first: int, lanes: int) -> None:
    """Wherever it begins, it comes close to what fits, and few rounds have more."""
    share = EvenShare(256)
    share.begin(first)
    taken = rounds(share, 600, fixed, each, lanes=lanes)
    fits = int((1 - fixed) / each + 1e-9)
    assert share.tokens <= min(256, 1.1 * fits / 0.9 + 1)
    assert share.tokens >= min(256, fits) * 0.5 or fits <= 2
    late = [tokens for tokens in taken[100:] if fixed + each * tokens > 1.1 + each]
    assert len(late) <= len(taken) // 12


def test_it_ends_where_one_token_is_too_much() -> None:
    share = EvenShare(256)
    share.begin(1)
    assert rounds(share, 40, 3.0, 0.1).count(1) == 1
    assert share.tokens == 0
    share.begin_anew()
    assert share.tokens == 0
    share.begin(1)
    assert rounds(share, 40, 1.05, 0.1).count(1) <= 4
    assert share.tokens == 0


def test_one_token_may_cost_half_of_a_round() -> None:
    """Where it is saved up instead, some tokens of streams come very late."""
    share = EvenShare(256, rows_in_turn=True)
    share.begin(1)
    assert set(rounds(share, 400, 0.2, 1.0)) == {1, 2}
    assert share.tokens == 1


def test_one_disturbed_round_ends_nothing() -> None:
    share = EvenShare(256)
    share.begin(1)
    rounds(share, 200, 0.3, 0.3)
    tokens = share.tokens
    assert tokens == 2
    for _ in range(6):
        share.measure(tokens, 20.0, 1.0, 0.0)
        rounds(share, 30, 0.3, 0.3)
    assert share.tokens == tokens


def test_rounds_that_are_long_now_and_then_count_as_well() -> None:
    """Two of ten rounds are far longer: their median says nothing of it, and fewer tokens go."""
    share = EvenShare(256)
    share.begin(8)
    for number in range(2000):
        tokens = share.tokens
        share.measure(tokens, (0.3 if number % 5 else 0.3 + 0.3 * tokens), 1.0, 0.0)
    assert 1 <= share.tokens <= 3


def test_other_rounds_are_tried_anew_from_half() -> None:
    share = EvenShare(256)
    share.begin(40)
    rounds(share, 100, 0.0, 0.01)
    tokens = share.tokens
    share.begin_anew()
    assert share.trying
    assert share.tokens == tokens // 2


def test_twice_as_many_are_tried_again_where_few_may_cost_as_much_as_many() -> None:
    """A disturbed trial ended with one token; where each costs as much as a row it gets on by little."""
    for rows_in_turn, least, most in ((False, 32, 256), (True, 1, 16)):
        share = EvenShare(256, rows_in_turn=rows_in_turn)
        share.begin(1)
        for _ in range(8):
            share.measure(share.tokens, 0.5 if share.tokens == 1 else 1.5, 1.0, 0.0)
        assert (share.tokens, share.trying) == (1, False)
        rounds(share, 400, 0.5, 0.001)
        assert least <= share.tokens <= most


def test_twice_as_many_are_no_more_tried_once_they_were_too_much() -> None:
    share = EvenShare(256)
    share.begin(8)
    taken = rounds(share, 600, 0.0, 0.1)
    assert share.tokens in (8, 9, 10)
    assert max(taken[300:]) <= 11


def measure(share: EvenShare, tokens: int, longer: float, count: int) -> int:
    """What rounds have after so many of these, where they may be longer by 1."""
    for _ in range(count):
        share.measure(tokens, longer, 1.0, 0.0)
    return share.tokens


def test_how_many_rounds_tell() -> None:
    share = EvenShare(256, rows_in_turn=True)
    share.begin(16)
    assert measure(share, 16, 2.0, 1) == 16
    assert measure(share, 18, 2.0, 9) == 16, "these are others"
    assert measure(share, 17, 2.0, 1) == 8, "half of what was twice too long"
    assert not share.trying
    assert measure(share, 8, 2.0, 23) == 8
    assert share.longer == 0.0
    assert measure(share, 8, 2.0, 1) == 4
    assert measure(share, 4, 0.5, 24) == 4
    assert share.longer == 0.5
    assert share.more == 5
    assert measure(share, 5, 0.625, 5) == 4
    assert measure(share, 5, 0.625, 1) == 5
    assert measure(share, 5, 0.5, 24) == 5
    assert measure(share, 6, 1.5, 24) == 5


def test_a_single_token_is_believed_too_much_after_more_rounds_unless_it_is_by_far() -> None:
    for longer, rounds_needed in ((1.5, 8), (2.0, 8), (2.5, 1)):
        share = EvenShare(256)
        share.begin(0)
        assert measure(share, 1, longer, rounds_needed - 1) == 1
        assert measure(share, 1, longer, 1) == 0
    share = EvenShare(256)
    share.begin(1)
    assert measure(share, 1, 1.0, 2) == 2
    assert measure(share, 2, 1.0, 2) == 4, "two cost no more than one"


def test_what_most_rounds_take_counts_once_there_are_enough() -> None:
    share = EvenShare(256)
    share.begin(16)
    measure(share, 16, 2.0, 2)
    assert share.tokens == 8
    for number in range(63):
        assert measure(share, 8, 2.1 if number % 10 == 0 else 0.5, 1) == 8
    assert measure(share, 8, 0.5, 1) == 4
    assert most_take(range(64)) == 59
    assert most_take(range(21)) == 19
