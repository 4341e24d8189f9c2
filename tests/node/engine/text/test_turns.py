"""Clients take turns, and one prompt of each costly kind is read at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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
