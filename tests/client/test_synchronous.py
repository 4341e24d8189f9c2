import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sealring.client import Client
from sealring.mesh.errors import FailedPrecondition, RosterError
from sealring.testing import ScriptedGateway
from sealring.testing.gateway import PIECES
from sealring.v1 import inference_pb2 as inference

QUESTION = [{"role": "user", "content": "what is the capital?"}]


async def with_client(gateway: ScriptedGateway, work: Callable[[Client], Any], **settings: Any) -> Any:
    def run() -> Any:
        with Client(
            gateway.address, **{"root_sha256": gateway.cluster.pin, "timeout": 30.0, **settings}
        ) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_streams_and_gives_the_whole(gateway: ScriptedGateway) -> None:
    def work(client: Client) -> Any:
        reply = client.chat(QUESTION, max_tokens=20)
        pieces = [delta.text for delta in reply]
        whole = client.complete("the capital").result()
        return pieces, reply.completion, whole, client.models(), client.rings()

    pieces, done, whole, models, rings = await with_client(gateway, work)
    assert tuple(pieces) == PIECES
    assert (done.text, done.finish_reason, done.usage.prompt_tokens) == ("".join(PIECES), "stop", 7)
    assert whole.text == done.text
    assert (models[0].name, rings[0]) == ("demo", done.ring)
    assert b"capital" not in b"".join(request.SerializeToString() for request in gateway.requests)


async def test_refuses_what_the_other_one_refuses(gateway: ScriptedGateway) -> None:
    for settings, error in (
        ({"root_sha256": b"\x00" * 32}, RosterError),
        ({"min_trust": 30}, FailedPrecondition),
    ):
        with pytest.raises(error):
            await with_client(gateway, lambda client: client.chat(QUESTION).result(), **settings)
    assert gateway.requests == []


async def test_leaving_the_reply_cancels_the_call(gateway: ScriptedGateway) -> None:
    cancelled = asyncio.Event()

    async def script(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        try:
            for response in gateway.reply(request)[:3]:
                yield response
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    def work(client: Client) -> str:
        with client.chat(QUESTION) as reply:
            return next(iter(reply)).text

    gateway.script = script
    assert await with_client(gateway, work) == PIECES[0]
    async with asyncio.timeout(200):
        await cancelled.wait()


def test_a_client_that_never_asked_has_nothing_to_close() -> None:
    with Client("127.0.0.1:1", root_sha256="ab" * 32) as client:
        pass
    client.close()


async def test_a_client_that_is_dropped_leaves_no_thread(gateway: ScriptedGateway) -> None:
    def run() -> threading.Thread:
        client = Client(gateway.address, root_sha256=gateway.cluster.pin)
        assert client.rings()
        return next(one for one in threading.enumerate() if one.name == "sealring")

    thread = await asyncio.to_thread(run)
    await asyncio.to_thread(thread.join)


async def test_several_threads_share_a_client(gateway: ScriptedGateway) -> None:
    def work(client: Client) -> list[str]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda _: client.chat(QUESTION).result().text, range(8)))

    assert await with_client(gateway, work) == ["".join(PIECES)] * 8


def test_a_closed_client_answers_no_more() -> None:
    client = Client("127.0.0.1:1", root_sha256="ab" * 32)
    client.close()
    with pytest.raises(RuntimeError):
        client.rings()
    client.close()
