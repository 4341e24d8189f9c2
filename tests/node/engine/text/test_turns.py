"""Clients take turns, and one prompt of each costly kind is read at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.text.turns import Turn, Turns


def taken(turns: Turns[str]) -> Turn[str]:
    turn = turns.take()
    assert turn is not None
    return turn


def put(turns: Turns[str], *items: str, kind: str = "") -> None:
    """The first letter of each is its client."""
    for item in items:
        turns.put(item[:1].encode(), int(item[1:]), item, kind)


def test_clients_take_turns_and_of_each_one_is_read_at_a_time() -> None:
    turns = Turns[str]()
    put(turns, "a1", "a2", "a3", "b4", "b5")
    first, second = taken(turns), taken(turns)
    assert (first.item, second.item, len(turns)) == ("a1", "b4", 3)
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(taken, turns)
        put(turns, "c6")
        assert waits.result(200).item == "c6"
    turns.done(second)
    assert taken(turns).item == "b5"
    turns.done(first)
    assert taken(turns).item == "a2"


def test_a_client_whose_prompts_are_costly_waits_for_itself() -> None:
    """Its second prompt is not read before its first one is, however many readers are free."""
    turns = Turns[str]()
    put(turns, *(f"a{number}" for number in range(100)))
    held = taken(turns)
    for number in range(200, 210):
        put(turns, f"b{number}")
        turn = taken(turns)
        assert turn.item == f"b{number}"
        turns.done(turn)
    turns.done(held)
    assert taken(turns).item == "a1"


def test_one_prompt_of_a_costly_kind_is_read_at_a_time() -> None:
    turns = Turns[str]()
    put(turns, "a1", "b2", kind="long")
    put(turns, "c3", "d4", kind="images")
    put(turns, "e5")
    long, images, short = taken(turns), taken(turns), taken(turns)
    assert (long.item, images.item, short.item) == ("a1", "c3", "e5")
    turns.done(short)
    turns.done(images)
    assert taken(turns).item == "d4"
    turns.done(long)
    assert taken(turns).item == "b2"


def test_what_waits_can_be_taken_back() -> None:
    turns = Turns[str]()
    put(turns, "a1", "a2", "b3")
    assert (turns.remove(1), turns.remove(1), turns.remove(9)) == ("a1", None, None)
    assert taken(turns).item == "a2"
    assert (turns.clear(), len(turns)) == (["b3"], 0)
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(turns.take)
        turns.close()
        assert waits.result(200) is None


def test_a_client_that_has_held_a_costly_kind_for_longer_comes_behind() -> None:
    """Between two parts of its prompt others with less have theirs, and it goes on where it was."""
    turns = Turns[str]()
    put(turns, "a1", "a2", kind="images")
    slow = taken(turns)
    assert not turns.charge(slow, 10)
    put(turns, "b3", "b4", kind="images")
    put(turns, "c5", kind="long")
    assert taken(turns).item == "c5"
    assert turns.charge(slow, 10)
    turns.put_back(slow, 1)
    quick = taken(turns)
    assert (quick.item, turns.charge(quick, 1)) == ("b3", False)
    turns.done(quick)
    assert (taken(turns).item, turns.remove(1), turns.remove(2), len(turns)) == ("b4", "a1", "a2", 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 4)), min_size=1))
def test_clients_hold_a_costly_kind_for_as_long_as_each_other(prompts: list[tuple[int, int, int]]) -> None:
    """While several have prompts, none is ahead of another by more than one part, and all are read."""
    turns, left, held = Turns[int](), {}, dict.fromkeys(range(4), 0)
    waiting = dict.fromkeys(range(4), 0)
    for number, (client, cost, parts) in enumerate(prompts):
        turns.put(b"%d" % client, number, number, "images")
        left[number] = [cost] * parts
        waiting[client] += 1
    while any(waiting.values()):
        turn = turns.take()
        assert turn is not None
        client, parts = int(turn.client), left[turn.item]
        others = [held[one] for one, count in waiting.items() if count and one != client]
        assert all(held[client] <= other for other in others)
        while parts:
            cost = parts.pop()
            held[client] += cost
            yields = turns.charge(turn, cost)
            assert yields == any(other < held[client] for other in others)
            if yields and parts:
                turns.put_back(turn, turn.item)
                break
        else:
            waiting[client] -= 1
            turns.done(turn)
            if not waiting[client]:
                held[client] = 1 << 30
    assert len(turns) == 0
