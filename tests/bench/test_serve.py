"""The open-loop client: arrivals, the keys of its result, and its reading of server-sent events."""

import asyncio
import json
import random

from bench.openai_client import Reply, ask
from bench.serve import arrivals, vllm_result


def test_arrivals_have_the_rate_and_depend_on_nothing_but_the_seed():
    times = arrivals(random.Random(3), 2000, 10.0, 1.0)
    assert times == arrivals(random.Random(3), 2000, 10.0, 1.0)
    assert times == sorted(times)
    assert 180 < times[-1] < 220
    assert arrivals(random.Random(3), 3, float("inf"), 1.0) == [0.0] * 3


def test_the_result_has_the_keys_of_vllm():
    good = Reply(0.0, [0.5, 0.6, 0.7], "abc", prompt_tokens=10, completion_tokens=3, ended=0.7)
    found = vllm_result([good, Reply(0.0, error="status 429", ended=1.0)], 2.0)
    assert found["completed"] == 1
    assert found["failed"] == 1
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 1.5
    assert round(found["mean_ttft_ms"]) == 500
    assert round(found["mean_tpot_ms"]) == 100
    for series in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{part}_{series}_ms" for part in ("mean", "median", "std", "p99")} <= set(found)


async def serve(answer):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for part in answer:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def event(text):
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n".encode()


async def test_chunked_and_plain_streams_are_read():
    usage = (
        b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    )
    body = event("a") + event("b") + usage
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7)
    )
    for head, sent in (
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunks + b"0\r\n\r\n"),
        (b"HTTP/1.0 200 OK\r\n\r\n", body),
    ):
        server, url = await serve([head, sent])
        async with server:
            reply = await ask(url, {"messages": []})
        assert reply.ok
        assert (reply.text, len(reply.arrivals), reply.completion_tokens) == ("ab", 2, 2)


async def test_errors_are_told_not_raised():
    server, url = await serve([b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"])
    async with server:
        reply = await ask(url, {})
    assert not reply.ok
    assert reply.error
    assert not (await ask(url, {})).ok
