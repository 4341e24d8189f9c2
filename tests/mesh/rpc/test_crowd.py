"""A crowd against a list of those who wait: the right one is sent away, and nobody else."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.rpc import Crowd
from sealring.mesh.rpc.crowd import Place

MOST = 4


class Followed:
    """A crowd, and what it should be."""

    def __init__(self) -> None:
        self.crowd = Crowd(MOST)
        self.waiting: list[tuple[int, str]] = []
        """The oldest first."""
        self.sent_away: list[int] = []
        self.places: dict[int, Place] = {}
        self.inside: dict[int, AbstractContextManager[None]] = {}
        self.names: dict[int, str] = {}

    def comes(self, number: int, name: str) -> None:
        self.waiting.append((number, name))
        if number not in self.places:
            self.places[number] = self.crowd.enter(name, lambda: self.sent_away.append(number))
        else:
            self.inside.pop(number).__exit__(None, None, None)
        if len(self.waiting) > MOST:
            ended = self.sent_away.pop()
            sizes = Counter(each for _, each in self.waiting)
            whose = dict(self.waiting)[ended]
            assert sizes[whose] == max(sizes.values())
            assert next(each for each, name in self.waiting if name == whose) == ended
            self.leaves(ended)
            del self.places[ended]
        assert not self.sent_away

    def leaves(self, number: int) -> None:
        self.waiting = [one for one in self.waiting if one[0] != number]

    def is_let_in(self, number: int, name: str) -> None:
        self.names[number] = name
        self.inside[number] = block = self.places[number].let_in(name)
        block.__enter__()
        self.leaves(number)

    def closes(self, number: int) -> None:
        self.places.pop(number).close()
        self.leaves(number)
        if number in self.inside:
            self.inside.pop(number).__exit__(None, None, None)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 99)), max_size=60))
def test_the_oldest_of_who_has_most_makes_room_for_who_comes(steps: list[tuple[int, str, int]]) -> None:
    followed = Followed()
    for number, (what, name, which) in enumerate(steps):
        chosen = sorted(followed.places)[which % len(followed.places)] if followed.places else number
        if what == 0 or not followed.places:
            followed.comes(number, name)
        elif what == 1:
            followed.closes(chosen)
        elif chosen in followed.inside:
            followed.comes(chosen, followed.names[chosen])
        else:
            followed.is_let_in(chosen, name)
        assert len(followed.crowd) == len(followed.waiting) <= MOST
