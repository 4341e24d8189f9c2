"""Members dealt to rings and put in order; their layers fit to the byte."""

from __future__ import annotations

import pytest

from sealring.coordinator.planning.arrangement import (
    Candidate,
    deal,
    match,
    preferred_places,
    shortfall,
    snake,
)
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.links import Network
from sealring.v1 import admin_pb2


def demand(layers: list[int], embedding: int = 0, head: int = 0, tied: bool = False) -> Demand:
    return Demand(tuple(layers), (0,) * len(layers), embedding, head, tied)


def machine(name: str, room: int) -> Candidate:
    """A member with exactly this room, in bytes."""
    made = Candidate(name, name, 1000, 10, taken=900 - room)
    assert made.room == room
    return made


def machines(*rooms: int) -> list[Candidate]:
    return [machine(name, room) for name, room in zip("abcdefgh", rooms, strict=False)]


def dealt(made: Demand, rooms: tuple[int, ...], replicas: int = 1) -> list[list[tuple[str, int]]] | None:
    members = machines(*rooms)
    places = {member.id: place for place, member in enumerate(members)}
    rings = deal(made, members, len(rooms) // replicas, replicas, places, Network())
    return rings and [[(member.id, layers) for member, layers in ring] for ring in rings]


@pytest.mark.parametrize(
    ("made", "rooms", "ring"),
    [
        (demand([10] * 4, 5, 3), (48,), "a4"),
        (demand([10] * 4, 5, 3), (47,), ""),
        (demand([10] * 4, 20), (40, 20), "a2 b2"),
        (demand([10] * 4, 20), (40, 19), ""),
        (demand([10] * 4, 20), (39, 20), ""),
        (demand([10] * 4, head=20), (40, 20), "b2 a2"),
        (demand([10] * 4, 20), (20, 40), "b2 a2"),
        (demand([10] * 4, 15, 5, tied=True), (25, 50), "a1 b3"),
        (demand([6, 6, 10], 5), (17, 10), "a2 b1"),
        (demand([6, 6, 10], 5), (10, 17), "b2 a1"),
        (demand([10] * 6, 20, 10), (30, 30, 30), "a1 b3 c2"),
        (demand([10] * 6, 20, 10), (20, 40, 30), "b2 a2 c2"),
        (demand([10] * 6, 20, 10), (29, 30, 30), ""),
        (demand([10] * 7, 10), (10, 10, 10, 10, 20, 10, 10), "e1 b1 c1 d1 f1 g1 a1"),
        (demand([10] * 7, 10), (10, 10, 10, 10, 19, 10, 10), ""),
        (demand([10] * 8, 10, 10), (20, 10, 20, 30, 20, 10, 10), "a1 b1 d2 e1 f1 g1 c1"),
    ],
)
def test_layers_fit_to_the_byte_in_the_first_order_that_holds_them(
    made: Demand, rooms: tuple[int, ...], ring: str
) -> None:
    found = dealt(made, rooms)
    assert (" ".join(f"{name}{layers}" for name, layers in found[0]) if found else "") == ring


def test_every_ring_of_a_deployment_has_to_hold_the_model() -> None:
    made = demand([10] * 4)
    assert dealt(made, (40, 30, 20, 10), replicas=2) == [[("a", 3), ("d", 1)], [("b", 2), ("c", 2)]]
    assert dealt(made, (40, 30, 10, 10), replicas=2) == [[("a", 3), ("d", 1)], [("b", 3), ("c", 1)]]
    assert dealt(made, (40, 29, 10, 10), replicas=2) is None


def test_members_are_dealt_to_and_fro() -> None:
    groups = snake(machines(8, 7, 6, 5, 4, 3, 2), 3, 2)
    assert [[member.id for member in group] for group in groups] == [["a", "d", "e"], ["b", "c", "f"]]


def test_members_stand_by_name_with_numbers_as_numbers_or_as_they_were_named() -> None:
    names = ["mac10", "mac", "mac2", "mac1", "2mac", "air"]
    members = [Candidate(f"id-{name}", name, 1, 1) for name in names]
    places = preferred_places(admin_pb2.DeploymentSpec(), members)
    assert sorted(places, key=lambda one: places[one]) == [
        f"id-{name}" for name in ("2mac", "air", "mac", "mac1", "mac2", "mac10")
    ]
    alike = [Candidate(name, "mac", 1, 1) for name in ("b", "a")]
    assert preferred_places(admin_pb2.DeploymentSpec(), alike) == {"a": 0, "b": 1}
    named = admin_pb2.DeploymentSpec(members=["id-mac2", "id-mac"])
    assert preferred_places(named, members) == {"id-mac2": 0, "id-mac": 1}


def test_a_split_by_hand_is_held_as_it_stands_or_by_the_strongest_where_it_is_heaviest() -> None:
    made = demand([10, 20, 30, 40], 5, 3)
    assert shortfall(made, list(zip(machines(15, 50, 43), (1, 2, 1), strict=True)), []) is None
    weak = machines(15, 49, 42)
    assert shortfall(made, list(zip(weak, (1, 2, 1), strict=True)), []) == (weak[1], 1, 50)
    assert shortfall(made, list(zip(weak, (1, 1, 2), strict=True)), [1, 1, 0]) == (weak[0], 0, 35)

    def matched(*rooms: int) -> str:
        return "".join(member.id for member in match(made, [1, 2, 1], [], machines(*rooms)))

    assert matched(15, 50, 43) == "abc"
    assert matched(60, 43, 50) == "bac"
    assert matched(60, 50, 43) == "abc", "it fits as it stands"
    assert matched(50, 43, 20) == "cab"
