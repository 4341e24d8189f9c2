"""Which ring a sealed prompt is for: by a key that stays here, never too busy and never below a floor."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.client.attempt import Attempt, Attempts
from sealring.client.choice import MOST, RingLoads, _deployment, choose_ring
from sealring.client.question import Question, chat_prompt, routing_key_of, text_prompt
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound
from sealring.mesh.prompt.images import NOTE
from sealring.mesh.prompt.sealed import ReplayGuard, RequestInfo
from sealring.mesh.ring import leeway
from sealring.mesh.roster import TENSOR
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import PaperCluster
from sealring.v1 import inference_pb2 as inference

RINGS = [f"demo-{number}" for number in range(4)]
LEVELS = dict.fromkeys(RINGS, TrustLevel.SOFTWARE) | {"demo-4": TrustLevel.SELF_SIGNED}
CLUSTER = PaperCluster(LEVELS, size=1, clock=lambda: 1_800_000_000)
LONG = "a system prompt that all conversations begin with " * 8


def loads_of(rows: int = 16, running: dict[str, int] | None = None, rings: list[str] = RINGS) -> RingLoads:
    return RingLoads(
        inference.RingLoad(ring=ring, rows=rows, running=(running or {}).get(ring, 0)) for ring in rings
    )


def chosen(key: bytes, loads: RingLoads, **options: object) -> str:
    return choose_ring(CLUSTER.roster, "demo", 0, loads, key, **options).id  # type: ignore[arg-type]


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


@given(st.binary(min_size=8, max_size=8), st.sampled_from(RINGS))
def test_a_key_has_one_ring_and_moves_only_when_that_is_not_there(key: bytes, gone: str) -> None:
    home = chosen(key, loads_of())
    assert chosen(key, loads_of()) == home
    left = chosen(key, loads_of(rings=[ring for ring in RINGS if ring != gone]))
    assert (left == home) == (gone != home)
    assert left != gone
    assert (chosen(key, loads_of(), avoid={gone}) == home) == (gone != home)


def test_keys_are_spread_over_all_rings_that_serve() -> None:
    homes = Counter(chosen(key_of(number), loads_of()) for number in range(400))
    assert set(homes) == set(RINGS)
    assert min(homes.values()) > 60


@given(st.integers(1, 64), st.dictionaries(st.sampled_from(RINGS), st.integers(0, 200)))
def test_the_gateways_hint_moves_a_key_only_off_a_ring_that_is_much_busier(
    rows: int, running: dict[str, int]
) -> None:
    home, now = chosen(key_of(1), loads_of(rows)), chosen(key_of(1), loads_of(rows, running))
    least = min(running.get(ring, 0) for ring in RINGS)
    room = least + leeway(rows)
    assert running.get(now, 0) <= room
    if running.get(home, 0) <= room:
        assert now == home


def showing(role: str) -> Question:
    image = inference.Image(data=b"picture")
    said = [inference.ChatMessage(role=role, images=[image]), inference.ChatMessage(role="user", content="x")]
    prompt = inference.Prompt(chat=inference.Chat(messages=said))
    return Question(prompt, inference.GenerateRequest(model="demo", choices=1), 60.0, b"salt", key_of(1))


def seeing(*rings: str) -> RingLoads:
    able = {ring: ["vision"] for ring in rings}
    return RingLoads(
        [inference.RingLoad(ring=ring, rows=16, capabilities=able.get(ring, [])) for ring in RINGS]
    )


def sealed(attempt: Attempt) -> inference.Chat:
    to = attempt.request.envelope.sealed_for
    info = RequestInfo("demo", to.request_id, to.expires, to.roster_hash)
    opened = CLUSTER.keys[to.ring].open_request(attempt.request.envelope.sealed, info, ReplayGuard())
    return inference.SealedPrompt.FromString(opened.body).prompt.chat


def test_an_image_is_sealed_for_a_ring_that_sees() -> None:
    for ring in RINGS:
        attempt = Attempts(showing("user")).next(CLUSTER.roster, seeing(ring))
        assert attempt.request.envelope.sealed_for.ring == ring
        assert sealed(attempt).messages[0].images


def test_no_image_is_sealed_for_a_model_that_cannot_see() -> None:
    with pytest.raises(InvalidInput) as caught:
        Attempts(showing("user")).next(CLUSTER.roster, seeing())
    assert caught.value.reason == "MODEL_CANNOT_SEE"
    lacking = [inference.RingLoad(ring=ring, rows=16, vision_not_installed=True) for ring in RINGS]
    with pytest.raises(FailedPrecondition) as lacks:
        Attempts(showing("user")).next(CLUSTER.roster, RingLoads(lacking))
    assert lacks.value.reason == "VISION_NOT_INSTALLED"
    (result, _) = sealed(Attempts(showing("tool")).next(CLUSTER.roster, seeing())).messages
    assert (result.content, len(result.images)) == (NOTE, 0)


def test_the_floor_comes_before_the_key() -> None:
    rings = [*RINGS, "demo-4"]
    for number in range(20):
        loads = loads_of(running={"demo-4": 99}, rings=rings)
        ring = choose_ring(CLUSTER.roster, "demo", 20, loads, key_of(number))
        assert ring.id == "demo-4"


def question(key: bytes) -> Question:
    return Question(text_prompt("x"), inference.GenerateRequest(model="demo", choices=1), 5.0, b"salt", key)


@pytest.mark.parametrize("key", [key_of(1), b""])
def test_what_was_sent_since_the_hint_counts_until_it_ends(key: bytes) -> None:
    """One client that sends everything at once, with one key or with none, overloads no ring."""
    loads = loads_of(rows=8)
    under_way = [Attempts(question(key)) for _ in range(32)]
    rings = Counter(attempts.next(CLUSTER.roster, loads).ring.id for attempts in under_way)
    assert set(rings) == set(RINGS)
    assert max(rings.values()) <= 32 / 4 + leeway(8) + 1
    for attempts in under_way:
        attempts.ended()
        attempts.ended()
    assert [loads.of(ring) for ring in RINGS] == [(0, 8)] * 4
    one_by_one = set()
    for _ in range(32):
        attempts = Attempts(question(key_of(1)))
        one_by_one.add(attempts.next(CLUSTER.roster, loads).ring.id)
        attempts.ended()
    assert len(one_by_one) == 1


def test_a_hint_that_lies_about_numbers_breaks_nothing() -> None:
    most = (1 << 32) - 1
    loads = RingLoads(
        [
            inference.RingLoad(ring="demo-0", rows=0, running=most, waiting=most),
            inference.RingLoad(ring="demo-1", rows=most),
            inference.RingLoad(ring="nobody", rows=1),
        ]
    )
    assert {chosen(key_of(number), loads) for number in range(20)} == {"demo-1"}


def test_the_key_is_of_the_conversation_and_of_this_client() -> None:
    def key(secret: bytes, *contents: str) -> bytes:
        roles = ("system", "user", "assistant", "user")
        pairs = zip(roles, contents, strict=False)
        return routing_key_of(secret, None, chat_prompt([{"role": r, "content": c} for r, c in pairs]))

    mine, other = bytes(32), bytes([1]) * 32
    first = key(mine, LONG, "hello")
    assert key(mine, LONG, "hello", "yes?", "more") == first
    assert len({first, key(mine, LONG, "bye"), key(other, LONG, "hello"), b""}) == 4
    assert key(mine, "short", "hello") == b""
    given_key = routing_key_of(mine, "k", text_prompt("a"))
    assert given_key == routing_key_of(mine, "k", text_prompt("b"))
    assert routing_key_of(mine, "", text_prompt(LONG)) == b""


@pytest.mark.parametrize(
    ("key", "reason"),
    [("x" * 257, "BAD_PROMPT_CACHE_KEY"), ("x" * 10_240, "BAD_PROMPT_CACHE_KEY"), ("\ud800", "BAD_UTF8")],
)
def test_bad_keys(key: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        routing_key_of(bytes(32), key, text_prompt("x"))
    assert caught.value.reason == reason
    assert key not in caught.value.message


def roster_of(*names: str) -> Any:
    return SimpleNamespace(rings=[SimpleNamespace(deployment=name) for name in names])


def test_models_are_named_where_there_are_several_and_some_are_told() -> None:
    assert _deployment(roster_of("a"), "") == _deployment(roster_of("a", "b"), "a") == "a"
    assert _deployment(roster_of("a", "openai/a"), "openai/a") == "openai/a"
    assert _deployment(roster_of("a", "b"), "openai/a") == "a"
    for names, model, message, hint in (
        (["a", "b"], "", "the request names no model", "the models in the roster are: a, b"),
        (["a"], "x" * 129, f"there is no model {'x' * 128!r}", "the models in the roster are: a"),
        ([], "", "no model is served", "an operator has one served with: sealring deploy MODEL"),
        ([f"m{n:02}" for n in range(21)], "", "the request names no model", None),
    ):
        with pytest.raises(NotFound) as caught:
            _deployment(roster_of(*names), model)
        assert (caught.value.message, caught.value.metadata["param"]) == (message, "model")
        assert caught.value.hint == hint or ("m19" in caught.value.hint and "m20" not in caught.value.hint)


def test_hints_are_bounded_and_ring_of_none_has_a_row() -> None:
    most = 1 << 20
    loads = RingLoads([inference.RingLoad(ring="r", rows=most + 5, running=most + 5, waiting=most + 7)])
    assert loads.of("r") == (2 * most, most)
    assert ("r" in loads, "s" in loads) == (True, False)
    loads.sent("s")
    assert loads.of("s") == (1, 1)
    loads.ended("s")
    assert loads.of("s") == (0, 1)
    assert RingLoads([inference.RingLoad(ring="r", rows=0)]).of("r") == (0, 1)


def test_without_a_key_the_least_busy_ring_is_taken_for_its_rows() -> None:
    loads = RingLoads(
        inference.RingLoad(ring=ring, rows=rows, running=running)
        for ring, rows, running in (("demo-0", 2, 2), ("demo-1", 8, 4), ("demo-2", 4, 4), ("demo-3", 2, 2))
    )
    assert {chosen(b"", loads) for _ in range(10)} == {"demo-1"}
    assert chosen(b"", loads, avoid={"demo-1"}) != "demo-1"
    with pytest.raises(FailedPrecondition) as caught:
        choose_ring(CLUSTER.roster, "demo", 21, loads, b"")
    assert (caught.value.metadata["min_trust"], caught.value.reason) == ("20", "TRUST_BELOW_FLOOR")


def test_a_key_chooses_among_so_many_rings() -> None:
    """As at a gateway: the same key finds the same ring through either."""
    assert MOST == 16


def test_no_prompt_is_sealed_for_rings_whose_links_are_in_clear() -> None:
    """A ring with sealed links is chosen if the model has one."""
    first, *others = CLUSTER.roster.rings
    in_clear = dataclasses.replace(first, strategy=TENSOR)
    alone = dataclasses.replace(CLUSTER.roster, rings=(in_clear,))
    with pytest.raises(FailedPrecondition) as caught:
        choose_ring(alone, "demo", 0, loads_of(), b"")
    assert caught.value.reason == "LINKS_IN_CLEAR"
    both = dataclasses.replace(CLUSTER.roster, rings=(in_clear, others[0]))
    for number in range(20):
        assert choose_ring(both, "demo", 0, loads_of(), key_of(number)) == others[0]
