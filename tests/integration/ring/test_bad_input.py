"""Bad input that a real ring or a real socket has to judge: one clear error, and others are served.

What is wrong by itself, tests/edge/http/test_bad_input.py and tests/api show.
"""

import asyncio
import socket

import grpc
import httpx
import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.mesh.rpc import from_rpc_error
from sealring.v1 import inference_pb2

pytestmark = CLUSTER


def body(**changes):
    return {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5} | changes


async def test_http_says_what_is_wrong(ring, reference):
    refused = [
        (body(model="nope"), 404, "model"),
        (body(messages=[{"role": "user", "content": "x" * 60_000}]), 400, "messages"),
        (body(temperature=1e9), 400, "temperature"),
        (body(stop=["a"] * 99), 400, "stop"),
        (body(logit_bias={str(len(reference.tokenizer)): 1}), 400, "logit_bias"),
        (body(guided_regex="a+"), 400, "guided_regex"),
        (b'{"model": "\xff\xfe"}', 400, None),
        (b'{"a":1' + b"[" * 5000, 400, None),
    ]
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(
        base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS, headers=headers
    ) as client:
        for sent, status, param in refused:
            how = {"content": sent} if isinstance(sent, bytes) else {"json": sent}
            response = await client.post("/v1/chat/completions", **how)
            assert response.status_code == status, response.text
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["param"], bool(error["message"])) == (param, True)
        assert (await client.post("/v1/chat/completions", json=body())).status_code == 200


async def test_a_huge_body_is_refused_without_being_read(ring):
    host, port = ring.cluster.http_url.removeprefix("http://").split(":")

    def send() -> bytes:
        with socket.create_connection((host, int(port)), timeout=100) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
            connection.sendall(f"{head}\r\nContent-Length: {100 << 20}\r\n\r\n".encode())
            return connection.recv(4096)

    assert b" 413 " in await asyncio.to_thread(send)


async def test_grpc_says_what_is_wrong(ring):
    for prompt, fields, code, reason in (
        (chat("x"), {"model": "nope"}, "NOT_FOUND", "MODEL_NOT_FOUND"),
        (inference_pb2.Prompt(), {}, "INVALID_ARGUMENT", ""),
        (chat("x", temperature=float("nan")), {}, "INVALID_ARGUMENT", ""),
        (chat("x " * 30_000), {}, "INVALID_ARGUMENT", "CONTEXT_TOO_LONG"),
        (chat("x"), {"min_trust": 30}, "FAILED_PRECONDITION", "TRUST_BELOW_FLOOR"),
        (chat("x"), {"request_id": "no spaces allowed"}, "INVALID_ARGUMENT", ""),
    ):
        envelope = inference_pb2.Envelope(clear=prompt)
        request = inference_pb2.GenerateRequest(**({"model": "demo", "envelope": envelope} | fields))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in ring.stub.Generate(request, timeout=LIMIT_SECONDS):
                pass
        error = from_rpc_error(caught.value)
        assert (caught.value.code().name, bool(error.reason)) == (code, True)
        assert not reason or error.reason == reason
    assert (await ring.ask(chat("Hello!"), 5)).completion_tokens
