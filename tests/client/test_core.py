"""What both kinds of clients make of their settings and of a question."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from sealring.client import AsyncClient, core
from sealring.client.attempt import GONE
from sealring.client.question import Question, text_prompt
from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.trust.levels import MAX_SCORE, TrustLevel
from sealring.testing import PaperCluster
from sealring.v1 import inference_pb2 as inference

FAR = "gateway.example:7710"
NEAR = "127.0.0.1:7710"
MESSAGES = [{"role": "user", "content": "hello"}]


class Asked(AsyncClient):
    """Answers with the question."""

    def _reply(self, question: Question) -> Any:
        return question


def client(gateway: str = NEAR, **settings: Any) -> Any:
    return Asked(gateway, root_sha256="ab" * 32, **settings)


def test_an_api_key_goes_over_loopback_or_with_credentials() -> None:
    credentials = grpc.ssl_channel_credentials()
    client(NEAR, api_key="k")
    client(FAR, api_key="k", credentials=credentials)
    client(FAR)
    client(FAR, user="me")
    with pytest.raises(ConfigError) as caught:
        client(FAR, api_key="k")
    assert caught.value.reason == "LOOPBACK_ONLY"


@pytest.mark.parametrize("gateway", ["", "gateway.example", "gateway.example:65536", "http://a:1"])
def test_every_gateway_has_an_address(gateway: str) -> None:
    for gateways in ([gateway], [NEAR, gateway]):
        with pytest.raises(InvalidInput) as caught:
            Asked(gateways, root_sha256="ab" * 32)
        assert caught.value.reason == "BAD_ADDRESS"
    with pytest.raises(InvalidInput) as caught:
        Asked([], root_sha256="ab" * 32)
    assert (caught.value.reason, caught.value.hint) == ("BAD_ADDRESS", "give host:port of one")


def test_what_is_told_to_the_gateway() -> None:
    assert core.metadata_of(None, "") is None
    assert core.metadata_of("", "") == (("authorization", "Bearer "),)
    both = core.metadata_of("k", "u" * 256)
    assert both == (("authorization", "Bearer k"), ("sealring-user", "u" * 256))
    for user in ("u" * 257, "é", "a\nb"):
        with pytest.raises(InvalidInput) as caught:
            core.metadata_of(None, user)
        assert caught.value.reason == "BAD_USER"


def test_the_higher_floor_holds() -> None:
    for floor in (-1, MAX_SCORE + 1):
        with pytest.raises(InvalidInput) as caught:
            client(min_trust=floor)
        assert caught.value.reason == "BAD_MIN_TRUST"
    assert client(min_trust=MAX_SCORE).chat(MESSAGES).request.min_trust == MAX_SCORE
    asked = client(min_trust=10)
    assert [asked.chat(MESSAGES, min_trust=one).request.min_trust for one in (0, 10, 20)] == [10, 10, 20]


def test_a_call_may_have_a_time_of_its_own() -> None:
    asked = client(timeout=7.0)
    assert asked.chat(MESSAGES).timeout == 7.0
    assert asked.chat(MESSAGES, timeout=3.0).timeout == 3.0


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_a_question_is_what_was_asked(kind: str) -> None:
    asked = client()
    options: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 5,
        "n": 2,
        "priority": -3,
        "deadline_ms": 9,
        "keep_alive": 0,
        "prompt_cache_key": "thread",
        "temperature": 0.5,
    }
    ask = (lambda **rest: asked.chat(MESSAGES, **rest)) if kind == "chat" else asked_text(asked)
    first, second = ask(**options), ask(**options | {"prompt_cache_key": "another"})
    numbers = {"max_tokens": 5, "choices": 2, "priority": -3, "deadline_ms": 9, "keep_alive": 0}
    assert first.request == inference.GenerateRequest(model="demo", **numbers)
    assert first.prompt.sampling.temperature == 0.5
    assert len(first.prefix_salt) == 32
    assert first.prefix_salt == second.prefix_salt != client().chat(MESSAGES).prefix_salt
    assert first.routing_key != second.routing_key


def test_a_roster_is_fetched_again_after_a_while() -> None:
    now = 100.0
    newest = core.Newest(clock=lambda: now)
    view: Any = object()
    assert (newest.recent(), newest.known) == (None, False)
    newest.set(view)
    for later, kept in ((0.0, True), (core.ROSTER_SECONDS, True), (core.ROSTER_SECONDS + 0.01, False)):
        now = 100.0 + later
        assert newest.recent() is (view if kept else None)
    assert newest.known


def test_what_is_left_out_asks_for_nothing() -> None:
    asked = client()
    for plain in (asked.chat(MESSAGES), asked.complete("hello"), asked.ask(text_prompt("hello"))):
        assert plain.request == inference.GenerateRequest(choices=1)
        assert (plain.timeout, plain.routing_key) == (600.0, b"")


def test_a_number_that_there_is_not_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="prioriti"):
        client().ask(text_prompt("hello"), prioriti=1)


def asked_text(asked: Any) -> Any:
    return lambda **rest: asked.complete("hello", **rest)


def test_what_the_gateway_says_of_rows_is_bounded() -> None:
    cluster = PaperCluster({"demo-0": TrustLevel.SOFTWARE, "demo-1": TrustLevel.SOFTWARE}, size=1)
    most = (1 << 32) - 1
    for rows, expected in (((1, 2), 3), ((most, 0), most), ((most, most), most)):
        serving = {
            f"demo-{number}": inference.RingLoad(ring=f"demo-{number}", rows=count, model_type="llama")
            for number, count in enumerate(rows)
        }
        found = core.model_of("demo", cluster.roster, serving)
        assert (found.rows, found.rings, found.model_type) == (expected, 2, "llama")
    assert core.model_of("demo", cluster.roster, {}).rings == 0


@pytest.mark.parametrize(("code", "gone"), [("DEADLINE_EXCEEDED", True), ("PERMISSION_DENIED", False)])
def test_an_address_at_which_nobody_answers_is_a_gateway_that_is_gone(code: str, gone: bool) -> None:
    """Another program had a restarting gateway's port, and an answer that had begun was given up."""
    none = grpc.aio.Metadata()
    failed = core.roster_failure(grpc.aio.AioRpcError(grpc.StatusCode[code], none, none))
    assert (failed.reason in GONE) is gone


def test_a_prediction_goes_with_the_prompt_and_so_is_sealed_with_it() -> None:
    class Asking(core.Asks[inference.Prompt]):
        def ask(self, prompt: inference.Prompt, **options: Any) -> inference.Prompt:
            assert options == {"n": 1}
            return prompt

    for prompt in (
        Asking().chat([{"role": "user", "content": "x"}], prediction="it is y", n=1, temperature=0.5),
        Asking().complete("x", prediction="it is y", n=1, temperature=0.5),
    ):
        assert (prompt.prediction, prompt.sampling.temperature) == ("it is y", 0.5)
