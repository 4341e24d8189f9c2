"""When nodes are asked to measure the links between them, and what becomes of their answers."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from ringtables import Machine, table

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.links import ASSUMED, NO_WAY, Link
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.link_survey import (
    AGAIN_SECONDS,
    FRESH_SECONDS,
    LATER_SECONDS,
    LinkSurvey,
)
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import Unavailable
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import Heartbeat, HeldModel, MeasureAnswer, MeasuredWay, RingHealth

FINE = MeasureAnswer(way=MeasuredWay(address="10.0.0.9:7", round_trip_us=200, bytes_per_second=10**9))


def problem(reason: str) -> MeasureAnswer:
    return MeasureAnswer(problem=membership_pb2.Problem(reason=reason))


class Bed:
    """A survey of nodes that answer at once."""

    def __init__(self) -> None:
        self.now, self.machine = 0.0, Machine()
        self.asked: list[str] = []
        self.addresses: dict[str, list[str]] = {}
        self.answer: MeasureAnswer | Exception = FINE
        self.sessions, self.links = Sessions(), Links(clock=lambda: self.now)
        questions: Any = SimpleNamespace(ask=self._ask)
        self.survey = LinkSurvey(
            *(self.links, self.sessions, questions, table(r=self.machine)),
            lambda member: self.addresses.get(member, ()),
            clock=lambda: self.now,
        )

    def come(self, name: str, *, measures: bool = True, **heartbeat: Any) -> NodeSession:
        session = NodeSession(name, name.encode() * 16, measures=measures, clock=lambda: self.now)
        self.sessions.open(session)
        session.beat(Heartbeat(**heartbeat))
        return session

    async def look(self, times: int = 1) -> list[str]:
        """The questions of this number of looks, by the names of caller and called."""
        self.asked.clear()
        for _ in range(times):
            await self.survey.look()
        return list(self.asked)

    async def _ask(self, member: str, question: Any, kind: type) -> MeasureAnswer:
        self.asked.append(f"{member}{question.member}")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def bed() -> Bed:
    return Bed()


async def test_each_pair_is_asked_once_when_it_is_there_and_again_after_an_hour(bed: Bed) -> None:
    for name in "ab":
        bed.come(name)
    bed.come("old", measures=False)
    assert await bed.look(3) == ["ab"]
    bed.now = 10
    bed.come("c")
    assert await bed.look(4) == ["ac", "bc"]
    assert bed.links.network().between("c", "b") == Link(1e-4, 1e9)
    bed.now = FRESH_SECONDS
    assert await bed.look(3) == ["ba"], "from its other end"
    bed.now = FRESH_SECONDS + 10
    assert await bed.look(3) == ["ca", "cb"]


async def test_a_node_whose_addresses_changed_is_measured_anew(bed: Bed) -> None:
    for name in "abc":
        bed.come(name)
    assert len(await bed.look(4)) == 3
    bed.addresses["b"] = ["169.254.7.7:7"]
    assert sorted("".join(sorted(pair)) for pair in await bed.look(4)) == ["ab", "bc"]


@pytest.mark.parametrize(
    ("answer", "seconds", "link"),
    [
        (problem("NO_WAY"), AGAIN_SECONDS, NO_WAY),
        (problem("PEER_UNREACHABLE"), AGAIN_SECONDS, NO_WAY),
        (problem("INTERNAL"), AGAIN_SECONDS, ASSUMED),
        (problem("RING_BUSY"), LATER_SECONDS, ASSUMED),
        (problem("MEASURED_LATELY"), LATER_SECONDS, ASSUMED),
        (MeasureAnswer(), FRESH_SECONDS, ASSUMED),
        (Unavailable("it went", reason="MEMBER_OFFLINE"), AGAIN_SECONDS, ASSUMED),
        (TimeoutError(), AGAIN_SECONDS, ASSUMED),
    ],
)
async def test_without_a_figure_a_pair_is_tried_again_later(
    bed: Bed, answer: Any, seconds: float, link: Link
) -> None:
    for name in "ab":
        bed.come(name)
    bed.answer = answer
    assert await bed.look(2) == ["ab"]
    assert bed.links.network().between("a", "b") == link
    bed.now = seconds - 1
    assert await bed.look() == []
    bed.now = seconds
    assert await bed.look() == ["ba"]


@pytest.mark.parametrize("after", [Phase.SERVING, Phase.WAITING])
async def test_nothing_is_measured_while_a_ring_forms(bed: Bed, after: Phase) -> None:
    """A ring whose member is away for days keeps nothing from being measured."""
    for name in "ab":
        bed.come(name)
    for bed.machine.phase in (Phase.PREPARING, Phase.COMMITTING):
        assert await bed.look() == []
    bed.machine.phase = after
    assert await bed.look() == ["ab"]


async def test_nothing_is_measured_while_a_ring_answers_or_a_model_comes(bed: Bed) -> None:
    """Be it on other nodes: they may share the network."""
    for name in "ab":
        bed.come(name)
    session = bed.come("c", measures=False)
    for busy in (
        Heartbeat(rings=[RingHealth(ring="r", steps=5)]),
        Heartbeat(rings=[RingHealth(ring="r", steps=6)]),
        Heartbeat(models=[HeldModel(name="m", size=9, done=3, coming=True)]),
        Heartbeat(models=[HeldModel(name="m", coming=True)]),
    ):
        session.beat(busy)
        assert await bed.look() == []
    for _ in range(2):
        session.beat(
            Heartbeat(
                rings=[RingHealth(ring="r", steps=6)],
                models=[
                    HeldModel(name="m", size=9, problem="no"),
                    HeldModel(name="a stage's part of it", size=9, done=3, fetched=True),
                ],
            )
        )
    assert await bed.look() == ["ab"]


async def test_of_very_many_nodes_not_all_are_measured(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.coordinator.rings.link_survey.MOST_NODES", 6)
    for number in range(8):
        bed.come(f"{number}")
    assert len(await bed.look(20)) == 15


async def test_pairs_of_which_none_is_due_are_not_built_again_until_something_changes(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []

    def counted(nodes: list[NodeSession], size: int) -> Any:
        built.append(nodes)
        return combinations(nodes, size)

    monkeypatch.setattr("sealring.coordinator.rings.link_survey.combinations", counted)
    for name in "abc":
        bed.come(name)
    assert len(await bed.look(4)) == 3
    built.clear()
    assert await bed.look(100) == []
    assert not built
    bed.addresses["b"] = ["169.254.7.7:7"]
    assert len(await bed.look(3)) == 2
    bed.now = FRESH_SECONDS
    assert len(await bed.look(4)) == 3
