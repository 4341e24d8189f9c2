"""What a request that is to be sealed becomes for the client that seals it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from sealring.client.sealing import SealingBackend
from sealring.client.types import (
    Choice,
    Completion,
    Delta,
    Model,
    Ring,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from sealring.edge.metrics import Metrics
from sealring.mesh.errors import InvalidInput, NotFound, Unavailable
from sealring.v1 import inference_pb2 as inference
from sealring.v1.model_pb2 import ModelCard


class Client:
    """Keeps what it was asked, and answers nothing."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    async def models(self) -> list[Any]:
        return []

    def ask(self, prompt: Any, **asked: Any) -> Any:
        self.asked = asked
        raise InvalidInput("enough")


async def asked(**fields: Any) -> dict[str, Any]:
    stand_in: Any = Client()
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="demo", envelope=envelope, **fields)
    with pytest.raises(InvalidInput):
        async for _ in SealingBackend(stand_in, Metrics()).generate(request):
            raise AssertionError("nothing was answered")
    return dict(stand_in.asked)


async def test_all_that_is_asked_reaches_the_client() -> None:
    own = {"model": "demo", "prompt_cache_key": None, "receipt_nonce": b""}
    assert await asked() == own
    numbers = {"max_tokens": 9, "min_trust": 3, "priority": -2, "deadline_ms": 7, "keep_alive": 0}
    found = await asked(choices=3, **numbers)
    assert found == own | {"n": 3} | numbers
    assert (await asked(prompt_cache_key=""))["prompt_cache_key"] == ""


async def test_what_is_sealed_already_is_refused() -> None:
    stand_in: Any = Client()
    sealed = inference.GenerateRequest(envelope=inference.Envelope(sealed=b"x"))
    with pytest.raises(InvalidInput) as refused:
        async for _ in SealingBackend(stand_in, Metrics()).generate(sealed):
            raise AssertionError("nothing was answered")
    assert (refused.value.reason, stand_in.asked) == ("SEALED_ALREADY", {})


RING = Ring("demo-0", "demo", 20, 3, b"", (), False)
STOP, LENGTH = inference.FINISH_REASON_STOP, inference.FINISH_REASON_LENGTH


class Reply:
    """The deltas of an answer, or of two, of which each is whole after the first."""

    ring = RING
    prompt_tokens = 5
    load_seconds = 1.5
    own = ModelCard(temperature=0.5)

    def __init__(self, deltas: Sequence[Delta], choices: int) -> None:
        self._deltas = deltas
        self.hear: Callable[[inference.Prefilling], None] = lambda told: None
        both = (Choice("ab", "stop", 3, ()), Choice("c", "length", 1, ()))[:choices]
        usage = Usage(self.prompt_tokens, 4, 3, drafted_tokens=2, accepted_tokens=1)
        self.completion = Completion("ab", "stop", usage, "demo", "id", RING, choices=both)

    def on_prefill(self, hear: Callable[[inference.Prefilling], None]) -> None:
        self.hear = hear

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for done in range(2):
            self.hear(inference.Prefilling(done=done, prompt_tokens=5))
        for delta in self._deltas:
            yield delta

    async def aclose(self) -> None:
        pass


class Answering(Client):
    """Has one model, and answers with these deltas."""

    def __init__(self, *deltas: Delta, choices: int = 1) -> None:
        super().__init__()
        self._deltas, self._choices = deltas, choices

    async def models(self) -> list[Any]:
        return [Model("demo", 4096, 20, 2, "llama", 8, card=ModelCard(parameters=9, precision="int4"))]

    def ask(self, prompt: Any, **asked: Any) -> Any:
        return Reply(self._deltas, self._choices)


async def answered(
    client: Any, metrics: Metrics, model: str = "demo", **asked: Any
) -> list[inference.GenerateResponse]:
    clear = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model=model, request_id="r", envelope=clear, **asked)
    return [event async for event in SealingBackend(client, metrics).generate(request)]


def counted(metrics: Metrics, name: str, model: str = "demo", **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"sealring_{name}", {"model_name": model, **labels})


@pytest.mark.parametrize("shown", [0, 2])
@pytest.mark.parametrize("choices", [1, 2])
async def test_an_answer_is_passed_on_and_counted(shown: int, choices: int) -> None:
    """One of which nothing is to be shown begins and ends all the same."""
    metrics = Metrics()
    deltas = [Delta("a", 1), Delta("b", 3)][:shown]
    events = await answered(Answering(*deltas, choices=choices), metrics)
    assert [event.WhichOneof("event") for event in events] == ["started", *["delta"] * shown, "finished"]
    assert events[0].started == inference.Started(
        request_id="r",
        model="demo",
        ring="demo-0",
        prompt_tokens=5,
        min_trust=20,
        roster_version=3,
        load_ms=1500,
        own=Reply.own,
    )
    both = [inference.FinishedChoice(reason=STOP, completion_tokens=3)]
    both += [inference.FinishedChoice(reason=LENGTH, completion_tokens=1)]
    assert events[-1].finished == inference.Finished(
        reason=STOP,
        prompt_tokens=5,
        completion_tokens=4,
        cached_tokens=3,
        drafted_tokens=2,
        accepted_tokens=1,
        choices=both if choices > 1 else [],
    )
    assert counted(metrics, "time_to_first_token_seconds_count") == (1 if shown else 0)
    assert counted(metrics, "inter_token_latency_seconds_count") == (1 if shown else 0)
    assert counted(metrics, "prompt_tokens_total") == 5
    assert counted(metrics, "generation_tokens_total") == 4
    assert counted(metrics, "request_success_total", finished_reason="stop") == 1


@pytest.mark.parametrize("shown", [0, 2])
async def test_how_far_a_long_prompt_is_is_passed_on_to_those_who_ask(shown: int) -> None:
    deltas = [Delta("a", 1), Delta("b", 3)][:shown]
    events = await answered(Answering(*deltas), Metrics(), tell_prefill=True)
    told, rest = events[:2], events[2:]
    assert [event.prefilling.done for event in told] == [0, 1]
    assert [event.WhichOneof("event") for event in rest] == ["started", *["delta"] * shown, "finished"]


async def test_a_program_that_leaves_while_its_prompt_is_computed_ends_the_question() -> None:
    left = asyncio.Event()

    class Waiting(Reply):
        async def __aiter__(self) -> AsyncIterator[Delta]:
            self.hear(inference.Prefilling(done=1, prompt_tokens=5))
            try:
                await asyncio.Event().wait()
                yield Delta("a", 1)
            finally:
                left.set()

    class Slow(Answering):
        def ask(self, prompt: Any, **asked: Any) -> Any:
            return Waiting([], 1)

    clear = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="demo", envelope=clear, tell_prefill=True)
    stand_in: Any = Slow()
    events = SealingBackend(stand_in, Metrics()).generate(request)
    assert (await anext(events)).prefilling.done == 1
    await events.aclose()
    assert left.is_set()


async def test_a_question_waits_for_its_gateway_though_no_roster_can_be_fetched() -> None:
    class Away(Answering):
        async def models(self) -> Any:
            raise Unavailable("the gateway sleeps")

    metrics = Metrics()
    await answered(Away(), metrics)
    assert counted(metrics, "prompt_tokens_total", "other") == 5


async def test_a_model_that_there_is_not_is_counted_as_other() -> None:
    metrics = Metrics()
    await answered(Answering(), metrics, "made up")
    assert counted(metrics, "prompt_tokens_total", "other") == 5
    assert counted(metrics, "prompt_tokens_total", "made up") is None


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        (Delta("a", 1, choice=1), inference.Delta(text="a", tokens=1, choice=1)),
        (Delta("", 1, reasoning="hm"), inference.Delta(tokens=1, parsed=inference.Parsed(reasoning="hm"))),
        (Delta("", 1, stop="END"), inference.Delta(tokens=1, parsed=inference.Parsed(stop="END"))),
        (
            Delta("", 1, tool_calls=(ToolCall("look", "{}", "one"),)),
            inference.Delta(
                tokens=1,
                parsed=inference.Parsed(
                    tool_calls=[inference.ToolCall(id="one", name="look", arguments="{}")]
                ),
            ),
        ),
        (
            Delta("a", 1, logprobs=(TokenLogprob(3, b"a", -0.5, (TopLogprob(4, b"b", -1.0),), True),)),
            inference.Delta(
                text="a",
                tokens=1,
                logprobs=[
                    inference.TokenLogprob(
                        id=3,
                        spelling=b"a",
                        logprob=-0.5,
                        prompt=True,
                        top=[inference.TopLogprob(id=4, spelling=b"b", logprob=-1.0)],
                    )
                ],
            ),
        ),
    ],
    ids=["text", "reasoning", "stop", "call", "logprobs"],
)
async def test_everything_that_a_piece_says_is_passed_on(delta: Delta, expected: inference.Delta) -> None:
    events = await answered(Answering(delta), Metrics())
    expected.text = delta.text  # which is said even where it is empty
    assert events[1].delta == expected


async def test_models_are_those_of_the_roster() -> None:
    stand_in: Any = Answering()
    backend = SealingBackend(stand_in, Metrics())
    (model,) = await backend.list_models()
    created = model.created
    assert model == inference.Model(
        name="demo",
        model_type="llama",
        context=4096,
        min_trust=20,
        rings=2,
        rows=8,
        created=created,
        card=ModelCard(parameters=9, precision="int4"),
    )
    assert await backend.get_model("demo") == model
    with pytest.raises(NotFound) as refused:
        await backend.get_model("other")
    assert refused.value.reason == "MODEL_NOT_FOUND"
