from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edgecert import write_edge_certificate

from sealring.cli.calls import client as client_module
from sealring.cli.calls.client import Question, gateway_access, inference
from sealring.cli.settings import CliSettings
from sealring.client import AsyncClient
from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.access.gate import Gate
from sealring.edge.access.interceptor import GateInterceptor
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.mesh.errors import ConfigError, NotFound, SealringError, Unavailable
from sealring.mesh.rpc.server import Server
from sealring.v1 import inference_pb2, inference_pb2_grpc


class Servicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.seen.append(request)
        if request.model == "none":
            raise NotFound("no model none", hint="see models")
        started = inference_pb2.Started(model="demo", ring="r", prompt_tokens=5, min_trust=10)
        yield inference_pb2.GenerateResponse(started=started)
        if request.model == "cut":
            return
        if request.model == "thinks":
            for thought in "hm":
                delta = inference_pb2.Delta(parsed=inference_pb2.Parsed(reasoning=thought))
                yield inference_pb2.GenerateResponse(delta=delta)
        for tokens, text in enumerate(["Pa", "ris", "."], start=1):
            delta = inference_pb2.Delta(text=text, tokens=tokens)
            if tokens == 1 and request.envelope.clear.sampling.HasField("logprobs"):
                told = delta.logprobs.add(id=3, spelling=b"Pa", logprob=-0.5)
                told.top.add(id=4, spelling=b"x", logprob=-1)
            yield inference_pb2.GenerateResponse(delta=delta)
        finished = inference_pb2.Finished(
            reason=inference_pb2.FINISH_REASON_STOP, prompt_tokens=5, completion_tokens=4
        )
        yield inference_pb2.GenerateResponse(finished=finished)


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[str, Servicer]]:
    servicer = Servicer()
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = Server([(add, servicer, "sealring.v1.Inference")])
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(0)


async def test_an_answer_comes_in_pieces(gateway: tuple[str, Servicer]) -> None:
    address, servicer = gateway
    pieces: list[str] = []
    question = Question(
        [("system", "be brief"), ("user", "hi")], "demo", 9, 10, {"temperature": 0.5, "seed": 7}
    )
    async with inference(address) as client:
        answer = await client.ask(question, pieces.append, seconds=10)
    assert pieces == ["Pa", "ris", "."]
    assert (answer.text, answer.finish, answer.model, answer.min_trust) == ("Paris.", "stop", "demo", 10)
    assert (answer.prompt_tokens, answer.completion_tokens) == (5, 4)
    assert answer.ttft_s > 0
    request = servicer.seen[0]
    assert [one.role for one in request.envelope.clear.chat.messages] == ["system", "user"]
    assert (request.max_tokens, request.min_trust) == (9, 10)
    assert request.envelope.clear.sampling.seed == 7


async def test_what_the_model_thinks_is_shown_and_no_part_of_the_answer(
    gateway: tuple[str, Servicer],
) -> None:
    pieces: list[str] = []
    said: list[str] = []
    async with inference(gateway[0]) as client:
        question = Question([("user", "hi")], "thinks")
        answer = await client.ask(question, pieces.append, seconds=200)
        await client.ask(question, said.append, seconds=200, on_reasoning=lambda text: None)
    assert ("".join(pieces), answer.text, "".join(said)) == ("hm\n\nParis.", "Paris.", "Paris.")


async def test_a_seed_is_sent_only_when_given(gateway: tuple[str, Servicer]) -> None:
    address, servicer = gateway
    async with inference(address) as client:
        await client.ask(Question([("user", "hi")]), lambda text: None, seconds=10)
    request = servicer.seen[0]
    assert not request.envelope.clear.sampling.HasField("seed")
    assert (request.max_tokens, request.min_trust) == (0, 0)


async def test_refusals_keep_their_reason(gateway: tuple[str, Servicer]) -> None:
    async with inference(gateway[0]) as client:
        with pytest.raises(NotFound, match="no model none"):
            await client.ask(Question([("user", "hi")], "none"), lambda text: None, seconds=10)
        with pytest.raises(SealringError) as caught:
            await client.ask(Question([("user", "hi")], "cut"), lambda text: None, seconds=10)
    assert caught.value.reason == "BROKEN_STREAM"


async def test_chat_asks_and_leaves(gateway: tuple[str, Servicer], sealring: Any) -> None:
    import asyncio

    done = await asyncio.to_thread(sealring, "chat", "hi", "--gateway", gateway[0], "--json")
    assert done.status == 0, done.err
    assert done.data["answer"] == "Paris."
    done = await asyncio.to_thread(sealring, "chat", "-", "--gateway", gateway[0], stdin="hi there\n")
    assert done.out == "Paris.\n"
    done = await asyncio.to_thread(sealring, "chat", "--gateway", gateway[0], stdin="one\ntwo\n\n")
    assert done.out == "Paris.\nParis.\n"
    assert len(gateway[1].seen[-1].envelope.clear.chat.messages) == 3


async def test_chat_options_reach_the_prompt(gateway: tuple[str, Servicer], sealring: Any) -> None:
    import asyncio

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
    command = ("chat", "hi", "--gateway", gateway[0], *flags, "--stop", "a", "--stop", "b")
    done = await asyncio.to_thread(sealring, *command, "--json")
    assert done.status == 0, done.err
    prompt = gateway[1].seen[-1].envelope.clear
    assert prompt.sampling == inference_pb2.Sampling(**options)
    assert list(prompt.stop) == ["a", "b"]
    (token,) = done.data["logprobs"]
    assert (token["token"], token["id"], token["logprob"]) == ("Pa", 3, -0.5)
    assert token["top"] == [{"token": "x", "id": 4, "logprob": -1.0}]
    refused = await asyncio.to_thread(sealring, *command)
    assert refused.status == 2


async def test_an_api_key_goes_with_every_call_over_tls(tmp_path: Path) -> None:
    certificate, key = write_edge_certificate(tmp_path)
    keys = KeyFile(tmp_path / "state")
    text, _ = keys.create([Scope.INFERENCE])
    key_file = tmp_path / "api.key"
    key_file.write_text(text + "\n")
    key_file.chmod(0o600)
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = Server([(add, Servicer(), "sealring.v1.Inference")], interceptors=[GateInterceptor(Gate(keys))])
    port = server.listen("127.0.0.1:0", EdgeTls(certificate, key).grpc_credentials())
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        settings = CliSettings(gateway=address, gateway_ca=certificate, api_key_file=key_file)
        async with inference(address, **gateway_access(settings)) as client:
            answer = await client.ask(Question([("user", "hi")]), lambda text: None, seconds=10)
        assert answer.text == "Paris."
        settings = CliSettings(gateway=address, gateway_ca=certificate)
        async with inference(address, **gateway_access(settings)) as client:
            with pytest.raises(SealringError) as caught:
                await client.ask(Question([("user", "hi")]), lambda text: None, seconds=10)
        assert caught.value.reason == "INVALID_API_KEY"
    finally:
        await server.stop(0)


async def test_an_api_key_never_leaves_the_machine_in_clear(tmp_path: Path) -> None:
    key_file = tmp_path / "api.key"
    key_file.write_text("srk_x")
    with pytest.raises(ConfigError) as wide:
        gateway_access(CliSettings(api_key_file=key_file))
    assert wide.value.reason == "SECRET_FILE_UNSAFE"
    key_file.chmod(0o600)
    access = gateway_access(CliSettings(api_key_file=key_file))
    with pytest.raises(ConfigError) as caught:
        async with inference("192.0.2.1:1", **access):
            pass
    assert caught.value.reason == "LOOPBACK_ONLY"
    with pytest.raises(ConfigError) as clear:
        AsyncClient("192.0.2.1:1", root_sha256="0" * 64, **access)
    assert clear.value.reason == "LOOPBACK_ONLY"
    async with inference("192.0.2.1:1") as client:
        assert client.api_key is None, "without a key it may go anywhere"
    for wrong in (b"\xff", b" \n", b"a\x07b"):
        key_file.write_bytes(wrong)
        with pytest.raises(ConfigError) as bad:
            gateway_access(CliSettings(api_key_file=key_file))
        assert bad.value.reason == "BAD_API_KEY_FILE"
    with pytest.raises(ConfigError) as missing:
        gateway_access(CliSettings(gateway_ca=tmp_path / "none"))
    assert missing.value.reason == "NO_SUCH_FILE"


@pytest.mark.parametrize(
    ("pieces", "rate", "first"),
    [
        ([(2.0, 1), (3.0, 5), (4.0, 9)], 4.0, 1.0),  # eight tokens in the two seconds after the first
        ([(2.0, 4), (4.0, 8)], 2.0, 1.0),
        ([(2.234567, 1), (5.234567, 8)], 2.33, 1.2346),
        ([(1.0, 1)], 0.0, 0.0),
        ([(5.0, 8)], 2.0, 4.0),  # all at once: eight tokens in four seconds
        ([(5.0, 7), (5.004, 8)], 2.0, 4.0),
        ([], 0.0, 8.0),  # no token came: nothing is known of a rate, and the answer took until its end
    ],
)
async def test_the_rate_is_that_of_tokens_whose_time_is_known(
    monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[float, int]], rate: float, first: float
) -> None:
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Stub:
        async def Generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield inference_pb2.GenerateResponse(started=inference_pb2.Started(model="m"))
            for at, tokens in pieces:
                clock.now = at
                yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x", tokens=tokens))
            finished = inference_pb2.Finished(completion_tokens=pieces[-1][1] if pieces else 0)
            clock.now = 9.0
            yield inference_pb2.GenerateResponse(finished=finished)

    question = Question([("user", "q")], "", 0, 0, {})
    answer = await client_module._stream(Stub(), question, lambda _: None, 1.0, None)
    assert (answer.tok_s, answer.ttft_s) == (rate, first)


async def test_a_stream_that_begins_without_its_head_is_none() -> None:
    class Stub:
        async def Generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())

    with pytest.raises(SealringError) as caught:
        await client_module._stream(Stub(), Question([("user", "q")]), lambda _: None, 1.0, None)
    assert caught.value.reason == "BROKEN_STREAM"


def test_only_who_was_not_reached_at_all_is_named() -> None:
    down = Unavailable("the ring is gone", reason="RING_DOWN")
    assert client_module.named(down, "the gateway", "h:1") is down
    nobody = client_module.named(Unavailable("x"), "the gateway", "h:1")
    assert (nobody.message, nobody.reason) == ("the gateway at h:1 cannot be reached", "UNREACHABLE")
