"""Questions from the terminal to scripted gateways: requests that they get and answers that are shown."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.calls import asking as asking_module
from sealring.cli.calls.asking import Asker, Question, Source, Target, asking, prefilled, waits_for
from sealring.client import Delta
from sealring.mesh.errors import FailedPrecondition, InvalidInput, NotFound, RosterError, SealringError
from sealring.mesh.roster import TENSOR
from sealring.mesh.rpc import Server
from sealring.testing import ScriptedGateway, saying
from sealring.testing.gateway import PIECES
from sealring.v1 import inference_pb2, inference_pb2_grpc

NO_ACCESS: Any = {"credentials": None, "api_key": None}
MESSAGES = [("system", "be brief"), ("user", "hi")]
HI = Question(MESSAGES, max_tokens=9, sampling={"temperature": 0.5, "seed": 7})


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with ScriptedGateway() as gateway:
        yield gateway


def at(gateway: ScriptedGateway, **changes: Any) -> Target:
    target = Target([gateway.address], NO_ACCESS, bytes.fromhex(gateway.cluster.pin))
    return dataclasses.replace(target, **changes)


async def test_a_sealed_answer_comes_in_pieces_from_the_verified_ring(gateway: ScriptedGateway) -> None:
    pieces: list[str] = []
    async with asking(at(gateway), seconds=30) as asker:
        answer = await asker.ask(HI, pieces.append)
    assert "".join(pieces) == answer.text == "".join(PIECES)
    assert (answer.model, answer.ring, answer.min_trust, answer.sealed) == ("demo", "demo-0", 10, True)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (7, 6, "stop")
    (request,) = gateway.requests
    assert request.envelope.WhichOneof("content") == "sealed"
    opened = gateway.open(request)[0]
    assert [(one.role, one.content) for one in opened.prompt.chat.messages] == MESSAGES
    assert opened.prompt.sampling == inference_pb2.Sampling(temperature=0.5, seed=7)
    assert opened.max_tokens == 9


async def test_a_gateway_of_another_cluster_gets_no_prompt(gateway: ScriptedGateway) -> None:
    async with asking(at(gateway, pin=bytes(32)), seconds=30) as asker:
        with pytest.raises(RosterError) as caught:
            await asker.ask(HI, str)
    assert caught.value.reason == "ROOT_PIN"
    assert gateway.requests == []


async def test_links_in_clear_get_no_prompt_before_the_user_says_clear(gateway: ScriptedGateway) -> None:
    (ring,) = gateway.cluster.draft.rings
    whole = tuple(dataclasses.replace(one, layers=(0, ring.total_layers)) for one in ring.members)
    gateway.cluster.publish(rings=(dataclasses.replace(ring, strategy=TENSOR, members=whole),))
    async with asking(at(gateway), seconds=30) as asker:
        with pytest.raises(FailedPrecondition) as caught:
            await asker.ask(HI, str)
        with pytest.raises(FailedPrecondition) as trusting:
            await asker.ask(dataclasses.replace(HI, min_trust=10), str)
    assert (caught.value.reason, "--clear" in caught.value.hint) == ("LINKS_IN_CLEAR", True)
    assert "--clear" not in trusting.value.hint, "a ring without sealed links has no trust at all"
    assert gateway.requests == []


@pytest.mark.parametrize("pin", [bytes(32), None], ids=["sealed", "in clear"])
async def test_a_gateway_that_is_not_reached_is_named(pin: bytes | None) -> None:
    async with asking(Target(["127.0.0.1:1"], NO_ACCESS, pin), seconds=30) as asker:
        with pytest.raises(SealringError, match=r"the gateway at 127\.0\.0\.1:1 cannot be reached") as caught:
            await asker.ask(HI, str)
    assert caught.value.reason == "UNREACHABLE"


async def test_what_is_left_off_ends_at_the_gateway_too(gateway: ScriptedGateway) -> None:
    ended, shown = asyncio.Event(), asyncio.Event()

    async def forever(_: Any) -> AsyncIterator[inference_pb2.SealedDelta]:
        yield inference_pb2.SealedDelta(text="a", tokens=1)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    gateway.script = saying(forever)
    async with asking(at(gateway), seconds=30) as asker:
        task = asyncio.create_task(asker.ask(HI, lambda text: shown.set()))
        await shown.wait()
        task.cancel()
        await asyncio.wait([task])
        await ended.wait()


class InClear(inference_pb2_grpc.InferenceServicer):
    """Answers prompts in clear."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        if request.model == "none":
            raise NotFound("no model none", hint="see models")
        if request.model == "ended":
            yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())
            return
        started = inference_pb2.Started(model="demo", ring="r", prompt_tokens=5, min_trust=10)
        yield inference_pb2.GenerateResponse(started=started)
        if request.model == "cut":
            return
        thought = inference_pb2.Parsed(reasoning="hm")
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(parsed=thought, tokens=1))
        delta = inference_pb2.Delta(text="Paris.", tokens=2)
        delta.logprobs.add(id=3, spelling=b"Pa", logprob=-0.5).top.add(id=4, spelling=b"x", logprob=-1)
        yield inference_pb2.GenerateResponse(delta=delta)
        finished = inference_pb2.Finished(
            reason=inference_pb2.FINISH_REASON_STOP, prompt_tokens=5, completion_tokens=2
        )
        yield inference_pb2.GenerateResponse(finished=finished)


@asynccontextmanager
async def in_clear() -> AsyncIterator[tuple[Target, InClear]]:
    servicer = InClear()
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = Server([(add, servicer, "sealring.v1.Inference")])
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield Target([f"127.0.0.1:{port}"], NO_ACCESS, None), servicer
    await server.stop(0)


async def test_an_answer_in_clear_says_so() -> None:
    pieces: list[str] = []
    async with in_clear() as (target, servicer), asking(target, seconds=30) as asker:
        answer = await asker.ask(HI, pieces.append)
    assert ("".join(pieces), answer.text) == ("hm\n\nParis.", "Paris.")
    assert (answer.model, answer.ring, answer.min_trust, answer.sealed) == ("demo", "r", 10, False)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (5, 2, "stop")
    token = {"token": "Pa", "id": 3, "logprob": -0.5}
    assert answer.logprobs == [{**token, "top": [{"token": "x", "id": 4, "logprob": -1.0}]}]
    (request,) = servicer.requests
    prompt = request.envelope.clear
    assert [(one.role, one.content) for one in prompt.chat.messages] == MESSAGES
    assert prompt.sampling == inference_pb2.Sampling(temperature=0.5, seed=7)
    assert request.max_tokens == 9


async def test_errors_in_clear_keep_their_reason() -> None:
    async with in_clear() as (target, _), asking(target, seconds=30) as asker:
        with pytest.raises(NotFound, match="no model none"):
            await asker.ask(dataclasses.replace(HI, model="none"), str)
        for model in ("cut", "ended"):
            with pytest.raises(SealringError) as caught:
                await asker.ask(dataclasses.replace(HI, model=model), str)
            assert caught.value.reason == "BROKEN_STREAM"


@pytest.mark.parametrize("way", ["sealed", "clear"])
async def test_who_waits_for_a_ring_that_is_away_is_told(
    gateway: ScriptedGateway, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, wherever it leads: nothing else tells a wait of minutes from a fault."""
    gateway.models = [inference_pb2.Model(name="demo", reason="mac1 is offline")]
    said = ""

    async def once_it_is_said(
        scripted: ScriptedGateway, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        nonlocal said
        while "Ctrl-C" not in said:
            said += capsys.readouterr().err
            await asyncio.sleep(0.01)
        for one in scripted.reply(request):
            yield one

    gateway.script = once_it_is_said
    target = at(gateway, pin=None) if way == "clear" else at(gateway)
    async with asking(target, seconds=60) as asker:
        answer = await asker.ask(HI, str)
    assert said == "waiting for a ring of demo: mac1 is offline; Ctrl-C ends\n"
    assert answer.text == "".join(PIECES)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"rings": 1, "reason": "it makes room for b"}, ""),  # its queue, or the prompt that is read
        ({}, "waiting for a ring of a: its machines do not answer"),
        (
            {"availability": inference_pb2.MODEL_AVAILABILITY_LOADING},
            "waiting for a ring of a: it is being loaded",
        ),
    ],
)
def test_what_a_request_waits_for_is_its_own_model(model: dict[str, Any], words: str) -> None:
    models = [inference_pb2.Model(name="a", aliases=["x"], **model), inference_pb2.Model(name="b", rings=1)]
    assert [waits_for(models, name) for name in ("a", "x", "b", "c", "")] == [words, words, "", "", ""]


async def test_who_names_no_model_of_several_is_told_how(gateway: ScriptedGateway) -> None:
    (ring,) = gateway.cluster.draft.rings
    other = dataclasses.replace(ring, deployment="demo-vision", id="demo-vision-0")
    gateway.cluster.publish(rings=(ring, other))
    async with asking(at(gateway), seconds=30) as asker:
        with pytest.raises(NotFound, match="the request names no model") as caught:
            await asker.ask(HI, str)
    chosen = "choose with --model NAME, in a conversation with /model NAME"
    assert f"demo, demo-vision; {chosen}" in caught.value.hint


async def test_a_wrong_message_is_refused_before_it_is_sent(gateway: ScriptedGateway) -> None:
    async with asking(at(gateway), seconds=30) as asker:
        with pytest.raises(InvalidInput):
            await asker.ask(Question([("user", "\ud800")]), str)
    assert gateway.requests == []


def scripted(*pieces: Delta | float, completion_tokens: int) -> Asker:
    """An asker of a stream; a number is the time at which what follows it comes, in seconds."""
    now = 1.0

    async def stream(_: Question) -> AsyncGenerator[Delta | Source, None]:
        nonlocal now
        for one in pieces:
            if isinstance(one, Delta):
                yield one
            else:
                now = one
        yield Source("m", "r", 10, 1, completion_tokens, "stop")

    return Asker(stream, sealed=True, clock=lambda: now)


@pytest.mark.parametrize(
    ("pieces", "rate", "first"),
    [
        ([(2.0, 1), (3.0, 5), (4.0, 9)], 4.0, 1.0),  # eight tokens in the two seconds after the first
        ([(2.0, 4), (4.0, 8)], 2.0, 1.0),
        ([(2.234567, 1), (5.234567, 8)], 2.33, 1.2346),
        ([(1.0, 1)], 0.0, 0.0),
        ([(5.0, 8)], 2.0, 4.0),  # all at once: eight tokens in four seconds
        ([(5.0, 7), (5.004, 8)], 2.0, 4.0),
        ([], 0.0, 8.0),  # without a token there is no rate, and the answer took until its end
    ],
)
async def test_the_rate_is_that_of_tokens_whose_time_is_known(
    pieces: list[tuple[float, int]], rate: float, first: float
) -> None:
    events = [part for at, tokens in pieces for part in (at, Delta("x", tokens))]
    asker = scripted(*events, 9.0, completion_tokens=pieces[-1][1] if pieces else 0)
    answer = await asker.ask(HI, str)
    assert (answer.tok_s, answer.ttft_s) == (rate, first)


async def test_reasoning_is_shown_and_no_part_of_the_answer() -> None:
    deltas = [Delta("", 1, reasoning="h"), Delta("", 2, reasoning="m"), Delta("Par", 3), Delta("is", 4)]
    asker = scripted(*deltas, completion_tokens=4)
    pieces: list[str] = []
    said: list[str] = []
    answer = await asker.ask(HI, pieces.append)
    await asker.ask(HI, said.append, on_reasoning=lambda text: None)
    assert ("".join(pieces), answer.text, "".join(said)) == ("hm\n\nParis", "Paris", "Paris")


async def test_the_command_asks_and_leaves(gateway: ScriptedGateway, here: Any) -> None:
    async def echo(asked: inference_pb2.SealedPrompt) -> AsyncIterator[inference_pb2.SealedDelta]:
        said = [one.content for one in asked.prompt.chat.messages]
        finish = inference_pb2.FINISH_REASON_STOP
        yield inference_pb2.SealedDelta(text=json.dumps(said), tokens=1, finish=finish)

    gateway.script = saying(echo)
    known = ("--gateway", gateway.address, "--root-sha256", gateway.cluster.pin)
    done = await asyncio.to_thread(here, "chat", "hi", *known, "--json")
    assert done.status == 0, done.err
    assert (done.data["answer"], done.data["sealed"]) == ('["hi"]', True)
    done = await asyncio.to_thread(here, "chat", "-", *known, stdin="hi there\n")
    assert done.out == '["hi there"]\n'
    assert done.err.endswith("; sealed, trust software, without a receipt (NOT_SIGNED))\n")
    done = await asyncio.to_thread(here, "chat", *known, stdin="one\ntwo\n\n")
    assert done.out == '["one"]\n["one", "[\\"one\\"]", "two"]\n'
    done = await asyncio.to_thread(here, "chat", "hi", "--gateway", gateway.address)
    assert (done.status, "[NO_ROOT_HASH]" in done.err, "--clear" in done.err) == (7, True, True)


async def test_options_reach_the_prompt(gateway: ScriptedGateway, here: Any) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 4,
        "repetition_penalty": 1.5,
        "repetition_context_size": 9,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logprobs": 1,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    known = ("--gateway", gateway.address, "--root-sha256", gateway.cluster.pin)
    command = ("chat", "hi", *known, *flags, "--stop", "a", "--stop", "b")
    done = await asyncio.to_thread(here, *command, "--json")
    assert done.status == 0, done.err
    prompt = gateway.open(gateway.requests[-1])[0].prompt
    assert prompt.sampling == inference_pb2.Sampling(**options)
    assert list(prompt.stop) == ["a", "b"]
    refused = await asyncio.to_thread(here, *command)
    assert refused.status == 2


def test_a_long_prompt_is_told_as_it_is_read() -> None:
    told = inference_pb2.Prefilling(done=12_000, prompt_tokens=30_000, seconds_left=40)
    assert prefilled(told) == "reading the prompt: 40 %, 12,000 of 30,000 tokens, 40 s left"
    assert prefilled(inference_pb2.Prefilling(prompt_tokens=9)) == "reading the prompt: 0 %, 0 of 9 tokens"


async def test_what_a_gateway_says_of_a_prompt_is_heard() -> None:
    class Told(inference_pb2_grpc.InferenceServicer):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
            assert request.tell_prefill
            yield inference_pb2.GenerateResponse(prefilling=inference_pb2.Prefilling(done=3, prompt_tokens=9))
            yield inference_pb2.GenerateResponse(started=inference_pb2.Started(model="demo"))
            yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())

    heard: list[Any] = []
    calls: Any = SimpleNamespace(stub=SimpleNamespace(), metadata=())
    calls.stub.Generate = lambda request, **rest: Told().Generate(request, None)
    question = dataclasses.replace(HI, hear=heard.append)
    pieces = [piece async for piece in asking_module.in_clear(calls, question, 30)]
    assert [(one.done, one.prompt_tokens) for one in heard] == [(3, 9)]
    assert len(pieces) == 1
