"""What is worth least goes first, and nothing is ever kept that leads nowhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.ring import NAME_BYTES, NO_CHAIN, Chain
from sealring.node.stored import policy
from sealring.node.stored.policy import Entry, Sights, WriteBudget, bound, victims

NOW = 1e9
ENTRIES = st.builds(
    lambda size, first, length, uses, age: Entry(size, first, first + length, uses, NOW - age),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 16),
    st.integers(1, 1024),
    st.integers(0, 50),
    st.floats(0, 2 * policy.MAX_AGE),
)


@given(st.dictionaries(st.text(max_size=4), ENTRIES, max_size=30), st.integers(-10, 1 << 22))
def test_as_many_bytes_go_as_have_to(entries: dict[str, Entry], excess: int) -> None:
    gone = victims(entries, excess, NOW)
    assert len(set(gone)) == len(gone)
    old = {name for name, entry in entries.items() if NOW - entry.used > policy.MAX_AGE}
    assert old <= set(gone)
    freed = sum(entries[name].size for name in gone)
    assert freed >= min(excess, policy.total(entries.values()))
    if chosen := [name for name in gone if name not in old]:
        assert freed - entries[chosen[-1]].size < excess, "one more than needed"
        left = [entry for name, entry in entries.items() if name not in set(gone)]
        assert all(
            policy.worth(entries[name], NOW) <= policy.worth(entry, NOW) for name in chosen for entry in left
        )


@given(st.integers(1, 40), st.integers(0, 39), st.integers(0, 3), st.integers(1, 1 << 16))
def test_a_prompt_loses_its_end_first(blocks: int, reused: int, uses: int, excess: int) -> None:
    """A later turn of the conversation reuses the first blocks; those that are left stay reachable."""
    entries = {
        str(index): Entry(1000 + index, 256 * index, 256 * (index + 1), uses + (index < reused), NOW - 60)
        for index in range(blocks)
    }
    gone = {int(name) for name in victims(entries, excess, NOW)}
    assert gone == set(range(blocks - len(gone), blocks))


def test_what_is_used_and_new_outlives_what_is_neither() -> None:
    entry = Entry(1000, 0, 256, 0, NOW)
    entries = {
        "used": entry._replace(uses=3),
        "new": entry,
        "old": entry._replace(used=NOW - 3 * policy.HALF_LIFE),
    }
    assert victims(entries, 1, NOW) == ["old"]
    assert victims(entries, 1001, NOW) == ["old", "new"]


def test_the_bound_follows_the_disk_unless_it_is_set() -> None:
    assert bound(5, used=0, free=0) == 5
    assert bound(None, used=1000, free=9000) == 1000
    assert bound(None, used=0, free=1 << 50) == policy.MOST


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(1, policy.BURST)), max_size=40))
def test_no_more_is_written_than_the_rate_allows(steps: list[tuple[float, int]]) -> None:
    now, written = 0.0, 0
    budget = WriteBudget(lambda: now)
    for wait, size in steps:
        now += wait
        written += size if budget.take(size) else 0
        assert written <= policy.BURST + now * policy.WRITE_RATE + 1


def chain(*names: int) -> Chain:
    return Chain(b"s" * NAME_BYTES, tuple(bytes([number]) * NAME_BYTES for number in names))


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), max_size=12))
def test_of_prompts_asked_once_only_what_was_seen_before_is_written(prompts: list[list[int]]) -> None:
    sights, seen = Sights(), set[int]()
    for names in prompts:
        worth = sights.worth(chain(*names), returns=False)
        known = list(itertools.takewhile(seen.__contains__, names))
        assert worth == (chain(*known) if known else NO_CHAIN)
        assert sights.worth(chain(*names), returns=True) == chain(*names)
        seen.update(names)


def test_what_was_seen_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MOST_SEEN", 3)
    sights = Sights()
    for names in ((1, 2), (3,), (1, 2), (4,)):
        sights.worth(chain(*names), returns=False)
    assert sights.worth(chain(1, 2), returns=False) == chain(1, 2)
    assert sights.worth(chain(3), returns=False) == NO_CHAIN
