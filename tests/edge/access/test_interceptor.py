"""API keys in the metadata of gRPC calls, over a real server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from edgecert import write_edge_certificate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from usagekit import nothing_used

from sealring.edge.access import interceptor
from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.access.gate import USE, Caller, Gate, Limits
from sealring.edge.access.interceptor import KEY_ID, GateInterceptor, _authorization, by_key
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.inference.service import SERVICE, InferenceService
from sealring.mesh.errors import SealringError
from sealring.mesh.rpc import ErrorInterceptor, Server, from_rpc_error
from sealring.testing import ScriptedBackend
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

ASK = inference.GenerateRequest(model="demo", envelope=inference.Envelope(clear=inference.Prompt(text="x")))


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(texts=[], roster=b"roster")


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "state")


@contextlib.asynccontextmanager
async def serving(
    backend: ScriptedBackend, keys: KeyFile, limits: Limits | None = None, credentials: Any = None
) -> AsyncIterator[str]:
    add = inference_grpc.add_InferenceServicer_to_server
    server = Server(
        [(add, InferenceService(backend, lambda: b"", nothing_used), SERVICE)],
        interceptors=[GateInterceptor(by_key(Gate(keys, limits)))],
    )
    port = server.listen("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def bearer(text: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {text}")]


async def problem(call: Any) -> SealringError:
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "read"):
            await call.read()
        else:
            await call
    return from_rpc_error(caught.value)


async def test_without_keys(backend: ScriptedBackend, keys: KeyFile) -> None:
    async with serving(backend, keys) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_grpc.InferenceStub(channel)
        assert len([event async for event in stub.Generate(ASK, timeout=200)]) == 2
        metadata = [("sealring-user", "me")]
        assert len([event async for event in stub.Generate(ASK, timeout=200, metadata=metadata)]) == 2
        assert backend.keys[0].startswith("ipv4:127.0.0.1")
        assert backend.keys[1] == "me"


async def test_a_caller_with_a_key_is_let_in_by_its_key_and_no_other(
    backend: ScriptedBackend, keys: KeyFile
) -> None:
    key, record = keys.create([Scope.INFERENCE])
    inside: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def let_in(peer: str, name: str) -> Iterator[None]:
        inside.append((peer, name))
        yield
        left.append((peer, name))

    left: list[tuple[str, str]] = []
    interceptors = [ErrorInterceptor(let_in=let_in), GateInterceptor(by_key(Gate(keys)))]
    server = grpc.aio.server(interceptors=interceptors)
    inference_grpc.add_InferenceServicer_to_server(
        InferenceService(backend, lambda: b"", nothing_used), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_grpc.InferenceStub(channel)
        for metadata in ([], bearer("nonsense")):
            await problem(stub.ListModels(inference.ListModelsRequest(), metadata=metadata))
            await problem(stub.Generate(ASK, metadata=metadata))
        assert not inside
        await stub.ListModels(inference.ListModelsRequest(), metadata=bearer(key))
        assert len([event async for event in stub.Generate(ASK, metadata=bearer(key))]) == 2
    await server.stop(0)
    assert inside == left
    assert [name for _, name in inside] == [record.id] * 2
    assert all(peer.startswith("ipv4:127.0.0.1:") for peer, _ in inside)


async def test_keys_and_scopes(backend: ScriptedBackend, keys: KeyFile) -> None:
    inference_key, record = keys.create([Scope.INFERENCE])
    read_key = keys.create([Scope.READ])[0]
    async with serving(backend, keys) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_grpc.InferenceStub(channel)
        for metadata in ([], bearer("none"), bearer(inference_key[:-2] + "zz")):
            for call in (
                stub.Generate(ASK, timeout=200, metadata=metadata),
                stub.ListModels(inference.ListModelsRequest(), timeout=200, metadata=metadata),
                stub.GetRoster(inference.GetRosterRequest(), timeout=200, metadata=metadata),
            ):
                error = await problem(call)
                assert (error.code, error.reason) == ("UNAUTHENTICATED", "INVALID_API_KEY")
        several = stub.Generate(ASK, timeout=200, metadata=bearer(inference_key) + bearer(read_key))
        assert (await problem(several)).reason == "SEVERAL_API_KEYS"
        assert not backend.keys
        twice = bearer(inference_key) * 2
        events = [event async for event in stub.Generate(ASK, timeout=200, metadata=twice)]
        assert len(events) == 2
        assert backend.keys == [record.id]
        load = inference.LoadModelRequest(model="demo")
        await stub.LoadModel(load, timeout=200, metadata=bearer(inference_key))
        assert [tenant for *_, tenant in backend.loads] == [record.id]
        denied = await problem(stub.Generate(ASK, timeout=200, metadata=bearer(read_key)))
        assert (denied.code, denied.reason) == ("PERMISSION_DENIED", "SCOPE_DENIED")
        answer = await stub.GetRoster(inference.GetRosterRequest(), timeout=200, metadata=bearer(read_key))
        assert answer.roster == b"roster"
        keys.revoke(record.id)
        gone = await problem(stub.Generate(ASK, timeout=200, metadata=bearer(inference_key)))
        assert gone.reason == "INVALID_API_KEY"


async def test_all_answers_of_a_call_count_for_its_key(backend: ScriptedBackend, keys: KeyFile) -> None:
    metadata = bearer(keys.create([Scope.INFERENCE])[0])
    async with (
        serving(backend, keys, Limits(key_at_once=2)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_grpc.InferenceStub(channel)
        for choices, reason in ((2, ""), (3, "TOO_MANY_ANSWERS")):
            ask = inference.GenerateRequest(choices=choices)
            ask.MergeFrom(ASK)
            call = stub.Generate(ask, timeout=200, metadata=metadata)
            if reason:
                assert (await problem(call)).reason == reason
            else:
                assert len([event async for event in call]) == 2


async def test_health_is_open_and_the_rest_is_not(backend: ScriptedBackend, keys: KeyFile) -> None:
    read_key = keys.create([Scope.READ])[0]
    async with serving(backend, keys) as address, grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await health.Check(asked, timeout=200)).status == health_pb2.HealthCheckResponse.SERVING
        assert (await problem(health.Watch(asked, timeout=200))).code == "UNAUTHENTICATED"
        watch = health.Watch(asked, timeout=200, metadata=bearer(read_key))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        refused = reflection.ServerReflectionInfo(iter([listing]), timeout=200)
        assert (await problem(refused)).code == "UNAUTHENTICATED"
        listed = reflection.ServerReflectionInfo(iter([listing]), timeout=200, metadata=bearer(read_key))
        assert SERVICE in str(await listed.read())


async def test_a_call_without_a_key_is_refused_before_its_message(
    backend: ScriptedBackend, keys: KeyFile
) -> None:
    keys.create([Scope.INFERENCE])
    async with serving(backend, keys) as address, grpc.aio.insecure_channel(address) as channel:
        method: Any = channel.stream_stream("/sealring.v1.Inference/Generate")
        call = method(timeout=100)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_without_a_message(backend: ScriptedBackend, keys: KeyFile) -> None:
    async with serving(backend, keys) as address, grpc.aio.insecure_channel(address) as channel:
        for method_name in ("Generate", "ListModels"):
            method: Any = channel.stream_stream(f"/sealring.v1.Inference/{method_name}")
            call = method(timeout=100)
            await call.done_writing()
            error = await problem(call)
            assert error.reason == "BAD_MESSAGE"


async def test_a_message_that_does_not_come_is_not_waited_for(
    backend: ScriptedBackend, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no key is needed: strangers would keep any number of calls."""
    monkeypatch.setattr(interceptor, "MESSAGE_SECONDS", 0.01)
    async with serving(backend, keys) as address, grpc.aio.insecure_channel(address) as channel:
        for name in ("sealring.v1.Inference/ListModels", "grpc.health.v1.Health/Check"):
            method: Any = channel.stream_stream(f"/{name}")
            assert (await problem(method(timeout=100))).reason == "BODY_TOO_SLOW"


async def test_tls_follows_its_files(backend: ScriptedBackend, keys: KeyFile, tmp_path: Path) -> None:
    certificate, key = write_edge_certificate(tmp_path)
    text = keys.create([Scope.INFERENCE])[0]
    tls = EdgeTls(certificate, key)
    async with serving(backend, keys, credentials=tls.grpc_credentials()) as address:
        for _ in range(2):
            trust = grpc.ssl_channel_credentials(certificate.read_bytes())
            async with grpc.aio.secure_channel(
                address, trust, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                stub = inference_grpc.InferenceStub(channel)
                answer = await stub.ListModels(
                    inference.ListModelsRequest(), timeout=200, metadata=bearer(text)
                )
                assert answer.models[0].name == "demo"
            write_edge_certificate(tmp_path)
            await tls.refresh()


@pytest.mark.parametrize(
    ("metadata", "header"),
    [
        (None, None),
        ((("other", "x"),), None),
        ((("other", "x"), ("authorization", "Bearer k")), "Bearer k"),
        ((("authorization", b"Bearer k"),), None),
        ((("authorization", "Bearer k"), ("authorization", "Bearer k")), "Bearer k"),
        ((("authorization", "Bearer k"), ("authorization", "Bearer l")), "Bearer k, Bearer l"),
    ],
)
def test_there_is_one_header_of_text_or_none(metadata: Any, header: str | None) -> None:
    context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
    assert _authorization(context) == header


@pytest.mark.parametrize("streams", [True, False])
async def test_who_asks_is_known_while_a_call_is_served(streams: bool) -> None:
    seen: list[str] = []

    async def one(requests: Any, context: Any) -> Any:
        seen.append(KEY_ID.get())

    async def several(requests: Any, context: Any) -> Any:
        seen.append(KEY_ID.get())
        yield

    gate: Any = SimpleNamespace(admit=lambda *_: contextlib.nullcontext(Caller("some key")))
    context: Any = SimpleNamespace(peer=lambda: "ipv4:192.0.2.1:7", invocation_metadata=tuple)
    interceptor = GateInterceptor(by_key(gate))
    requests: Any = ()
    if streams:
        assert [event async for event in interceptor.stream(several, USE, one=False)(requests, context)]
    else:
        await interceptor.call(one, USE, one=False)(requests, context)
    assert seen == ["some key"]
