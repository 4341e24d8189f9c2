from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.drafts import Lookup


def reference(said: list[int], count: int) -> list[int]:
    for length in (3, 2):
        for end in range(len(said) - 1, length - 1, -1):
            if said[end - length : end] == said[-length:]:
                going = list(said)
                for place in range(end, end + count):
                    going.append(going[place])
                return going[len(said) :]
    return [said[-1]] * count


@given(
    prompt=st.lists(st.sampled_from([0, 1, 256, 65_536]), min_size=1, max_size=24),
    answer=st.lists(st.sampled_from([0, 1, 256, 65_536]), max_size=12),
    count=st.integers(1, 9),
)
def test_drafts_are_what_followed_the_newest_place(prompt: list[int], answer: list[int], count: int) -> None:
    """Tokens whose bytes would also match between two tokens."""
    lookup = Lookup(np.array(prompt, np.uint32).tobytes())
    for token in answer:
        lookup.add(token)
    said = prompt + answer
    assert lookup.drafts(said[-1], count) == reference(said, count)


def test_a_lookup_that_has_not_heard_the_last_token_guesses_nothing() -> None:
    lookup = Lookup(np.array([1, 2, 3, 1, 2], np.uint32).tobytes())
    assert lookup.drafts(9, 3) == [9, 9, 9]
