"""Which ring a key prefers: steady while rings come and go, never much busier, and of one scope only."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.ring import choose, leeway, ranked, routing_key
from sealring.mesh.ring.routing import MOST_LEEWAY, SHORTEST
from sealring.v1 import inference_pb2 as inference

SECRET = bytes(range(32))
keys = st.binary(min_size=8, max_size=8)
names = st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=24)


def order_of(key: bytes, rings: set[str] | list[str], most: int = 100) -> list[str]:
    return ranked(key, sorted(rings), str, most)


@settings(max_examples=25)
@given(keys, names, st.data())
def test_only_the_keys_of_a_ring_that_leaves_move(key: bytes, rings: set[str], data: st.DataObject) -> None:
    """And back again when it comes: the order of all others stays as it was."""
    order = order_of(key, rings)
    assert sorted(order) == sorted(rings)
    gone = data.draw(st.sampled_from(sorted(rings)))
    assert order_of(key, rings - {gone}) == [ring for ring in order if ring != gone]
    assert order_of(key, rings, 3) == order[:3]


def test_keys_are_spread_evenly_and_so_are_those_of_a_ring_that_is_gone() -> None:
    rings = [f"demo-{number}" for number in range(5)]
    orders = [order_of(number.to_bytes(8, "big"), rings) for number in range(5000)]
    first = Counter(order[0] for order in orders)
    second = Counter(order[1] for order in orders if order[0] == rings[0])
    assert min(first.values()) > 850
    assert max(first.values()) < 1150
    assert sorted(second) == rings[1:]
    assert min(second.values()) > 180


requests = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 256)), min_size=1, max_size=16)


@settings(max_examples=25)
@given(requests)
def test_the_chosen_ring_is_the_first_that_is_not_much_busier(loads: list[tuple[int, int]]) -> None:
    at = choose(loads)
    least = min(there / rows for there, rows in loads)

    def much_busier(load: tuple[int, int]) -> bool:
        there, rows = load
        return there - leeway(rows) > least * rows + 1e-9

    assert not much_busier(loads[at])
    assert all(much_busier(load) for load in loads[:at])


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=300),
)
def test_whatever_keys_come_no_ring_is_overloaded_and_none_is_starved(
    rows: list[int], events: list[tuple[int, bool]]
) -> None:
    """Few keys, or one: requests come, and now and then the oldest of the busiest ring ends."""
    there = [0] * len(rows)
    rings = list(range(len(rows)))
    for number, ends in events:
        order = ranked(number.to_bytes(8, "big"), rings, str, len(rings))
        ring = order[choose([(there[each], rows[each]) for each in order])]
        least = min(count / size for count, size in zip(there, rows, strict=True))
        there[ring] += 1
        assert there[ring] <= least * rows[ring] + leeway(rows[ring]) + 1 + 1e-9
        if ends:
            busiest = max(rings, key=lambda each: there[each] / rows[each])
            there[busiest] -= 1
    if len(set(rows)) == 1 and not any(ends for _, ends in events):
        most = len(events) / len(rows) + leeway(rows[0]) + 1
        assert max(there, default=0) <= math.ceil(most)


def test_the_leeway_follows_the_rows_and_ends() -> None:
    assert [leeway(rows) for rows in (1, 3, 4, 11, 12, 16, 28, 256)] == [0, 0, 1, 1, 2, 2, 4, MOST_LEEWAY]


def chat(*contents: str) -> inference.Prompt:
    roles = ("system", "user", "assistant", "user")
    messages = zip(roles, contents, strict=False)
    return inference.Prompt(
        chat=inference.Chat(
            messages=[inference.ChatMessage(role=role, content=content) for role, content in messages]
        )
    )


LONG = "x" * SHORTEST


def derived(prompt: inference.Prompt, scope: str = "") -> bytes:
    return routing_key(SECRET, scope, None, prompt)


def test_the_turns_of_a_conversation_have_one_key_and_another_conversation_has_another() -> None:
    first = derived(chat(LONG, "hello"))
    assert first
    assert derived(chat(LONG, "hello", "yes?", "tell me more")) == first
    assert derived(chat(LONG, "good day")) != first
    assert derived(chat(LONG + "y", "hello")) != first
    assert derived(inference.Prompt(text=LONG + "hello")) != first


def test_images_count_where_the_text_counts() -> None:
    def showing(*images: bytes) -> inference.Prompt:
        prompt = chat("be brief", "hello")
        for image in images:
            prompt.chat.messages[-1].images.add(data=image, at=5)
        return prompt

    prompts = [showing(b"x" * 300), showing(b"y" * 300), showing(b"x" * 301), showing(b"x" * 300, b"y")]
    assert len({derived(prompt) for prompt in prompts}) == len(prompts)
    assert derived(showing()) == b""


def tokens(*ids: int) -> inference.Prompt:
    return inference.Prompt(tokens=inference.TokenIds(ids=ids))


@pytest.mark.parametrize(
    "make",
    [
        lambda size: chat("x" * (size - 5), "hello"),
        lambda size: inference.Prompt(text="x" * size),
        lambda size: tokens(*range(size)),
    ],
    ids=["chat", "text", "tokens"],
)
def test_what_is_too_short_to_be_kept_has_no_key(make: Callable[[int], inference.Prompt]) -> None:
    assert derived(make(255)) == b""
    assert len(derived(make(256))) == 8
    assert derived(make(256)) != derived(make(257))


def test_prompts_of_other_kinds_and_beginnings_have_other_keys() -> None:
    ids = list(range(5000))
    same = tokens(*ids[:4096], 7, 7)
    assert derived(tokens(*ids)) == derived(same), "what comes after 4096 tokens is not looked at"
    others = [tokens(1, *ids[1:]), tokens(*ids[:4095], 7), inference.Prompt(text=LONG), chat(LONG, "x")]
    others += [chat(LONG, "y"), chat("", LONG), chat(LONG + "x", "")]
    assert len({derived(one) for one in (*others, same)}) == len(others) + 1


def test_eight_messages_are_looked_at_where_no_user_speaks() -> None:
    def spoken(count: int, last: str) -> bytes:
        messages = [inference.ChatMessage(role="system", content=LONG) for _ in range(count - 1)]
        messages.append(inference.ChatMessage(role="system", content=last))
        return derived(inference.Prompt(chat=inference.Chat(messages=messages)))

    assert spoken(8, "one") != spoken(8, "two")
    assert spoken(9, "one") == spoken(9, "two")


def test_a_key_that_is_given_counts_alone_and_an_empty_one_asks_for_none() -> None:
    one, other = chat(LONG, "one"), chat(LONG, "other")
    given_key = routing_key(SECRET, "", "mine", one)
    assert given_key == routing_key(SECRET, "", "mine", other) == routing_key(SECRET, "", "mine", None)
    assert given_key != derived(one)
    assert routing_key(SECRET, "", "", one) == b""
    assert routing_key(SECRET, "", None, None) == b""


@settings(max_examples=25)
@given(st.text(max_size=40), st.text(max_size=40), st.text(min_size=1, max_size=40))
def test_equal_keys_of_two_tenants_have_nothing_to_do_with_each_other(one: str, other: str, key: str) -> None:
    same = routing_key(SECRET, one, key, None) == routing_key(SECRET, other, key, None)
    assert same == (one == other)


@settings(max_examples=25)
@given(
    st.text(max_size=9), st.text(min_size=1, max_size=9), st.text(max_size=9), st.text(min_size=1, max_size=9)
)
def test_scope_and_key_cannot_be_shifted_into_each_other(a: str, b: str, c: str, d: str) -> None:
    assert (routing_key(SECRET, a, b, None) == routing_key(SECRET, c, d, None)) == ((a, b) == (c, d))


def test_without_the_secret_a_key_says_nothing_about_its_ring() -> None:
    """Key, scope and rings with another secret find the ring no better than chance."""
    rings = [f"demo-{number}" for number in range(4)]
    hits = 0
    for number in range(2000):
        real, guessed = (routing_key(secret, "k", str(number), None) for secret in (SECRET, os.urandom(32)))
        hits += order_of(real, rings, 1) == order_of(guessed, rings, 1)
    assert 380 < hits < 620


@pytest.mark.parametrize("length", [4 << 20, 10_000])
def test_a_long_beginning_costs_no_more(length: int) -> None:
    """Only the start of a message is read, and its length."""
    one, other = chat("y" * length, "hello"), chat("y" * (length - 1), "hello")
    assert derived(one) != derived(other)
    assert derived(inference.Prompt(text="y" * length)) == derived(inference.Prompt(text="y" * (length - 1)))


def test_gateways_and_clients_of_any_release_prefer_the_same_ring_for_a_key() -> None:
    """By the outputs of splitmix64."""
    rings = [f"demo-{number}" for number in range(4)]
    assert order_of(bytes(8), rings) == ["demo-0", "demo-2", "demo-3", "demo-1"]
    assert order_of(bytes(range(8)), rings) == ["demo-0", "demo-2", "demo-1", "demo-3"]
