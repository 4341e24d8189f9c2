"""Bad input gets one clear error on every edge, and the ring goes on serving others."""

import asyncio
import socket

import grpc
import httpx
import pytest
from grpc_status import rpc_status
from ringtest import CLUSTER, chat

from sealring.v1 import inference_pb2

pytestmark = CLUSTER
HELLO = [{"role": "user", "content": "Hello!"}]


def body(**changes):
    return {"model": "demo", "messages": HELLO, "max_tokens": 5} | changes


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        (body(model="nope"), 404, "model"),
        (body(messages=[]), 400, "messages"),
        (body(messages=[{"role": "user", "content": "x" * 60_000}]), 400, "messages"),
        (body(temperature=-1), 400, "temperature"),
        (body(temperature=1e9), 400, "temperature"),
        (body(top_p=1.5), 400, "top_p"),
        (body(max_tokens=-5), 400, "max_tokens"),
        (body(colour="red"), 400, "colour"),
        (body(messages=[{"role": "wizard", "content": "x"}]), 400, "messages"),
        (body(stop=["a"] * 99), 400, "stop"),
    ],
    ids=str,
)
async def test_http_says_what_is_wrong(ring, sent, status, param):
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=30) as client:
        response = await client.post("/v1/chat/completions", json=sent)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert param in (error["param"] or ""), error
        assert (await client.post("/v1/chat/completions", json=body())).status_code == 200


async def test_a_huge_body_is_refused_without_being_read(ring):
    host, port = ring.cluster.http_url.removeprefix("http://").split(":")

    def send() -> bytes:
        with socket.create_connection((host, int(port)), timeout=100) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
            connection.sendall(f"{head}\r\nContent-Length: {100 << 20}\r\n\r\n".encode())
            return connection.recv(4096)

    assert b" 413 " in await asyncio.to_thread(send)
    assert (await ring.ask(chat("Hello!"), 5)).completion_tokens


@pytest.mark.parametrize(
    "raw", [b'{"model": "\xff\xfe"}', b"{not json", b"[1]", b"", b'{"a":1' + b"[" * 5000]
)
async def test_broken_bodies_are_refused(ring, raw):
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=30) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/chat/completions", content=raw, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "reason"),
    [
        (chat("x"), {"model": "nope"}, "NOT_FOUND", "MODEL_NOT_FOUND"),
        (inference_pb2.Prompt(), {}, "INVALID_ARGUMENT", None),
        (chat(), {}, "INVALID_ARGUMENT", None),
        (chat("x", temperature=float("nan")), {}, "INVALID_ARGUMENT", None),
        (chat("x " * 30_000), {}, "INVALID_ARGUMENT", "CONTEXT_TOO_LONG"),
        (chat("x"), {"min_trust": 30}, "FAILED_PRECONDITION", None),
        (chat("x"), {"request_id": "no spaces allowed"}, "INVALID_ARGUMENT", None),
    ],
    ids=str,
)
async def test_grpc_says_what_is_wrong(ring, prompt, fields, code, reason):
    envelope = inference_pb2.Envelope(clear=prompt)
    request = inference_pb2.GenerateRequest(**({"model": "demo", "envelope": envelope} | fields))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in ring.stub.Generate(request, timeout=30):
            pass
    assert caught.value.code().name == code, caught.value
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert any("ErrorInfo" in detail.type_url for detail in status.details)
    if reason:
        assert any(reason.encode() in detail.value for detail in status.details)
    assert (await ring.ask(chat("Hello!"), 5)).completion_tokens
