import asyncio
import inspect
import pydoc
import re
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster

from sealring.client import AsyncClient, Client
from sealring.mesh.errors import ConfigError, FailedPrecondition, RosterError
from sealring.mesh.pki import Role
from sealring.mesh.system.paths import default_state_root
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


async def test_the_example_of_the_page_runs(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sealed-prompts.md").read_text()
    (example,) = re.findall(r"```python\n(from sealring.client import Client\n.*?)```", page, re.DOTALL)
    told = example.replace("Client()", f"Client({gateway.address!r}, root_sha256={gateway.cluster.pin!r})")
    assert told != example
    await asyncio.to_thread(exec, told, {})
    assert "".join(PIECES) in capsys.readouterr().out
    asked = b"".join(request.SerializeToString() for request in gateway.requests)
    assert b"tail call" not in asked


def test_help_names_the_clients_own_settings_and_options() -> None:
    settings = inspect.signature(Client).parameters
    assert settings.keys() == inspect.signature(AsyncClient).parameters.keys() - {"channels"}
    shown = pydoc.render_doc(Client, renderer=pydoc.plaintext)
    for name in ("root_sha256", "min_trust", "chat(self, messages", "tools", "complete(self, text"):
        assert name in shown


async def test_without_a_root_hash_the_machines_own_cluster_is_meant(
    gateway: ScriptedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as nowhere:
        Client(gateway.address)
    assert nowhere.value.reason == "NO_ROOT_HASH"
    SigningCluster(tmp_path).save(default_state_root() / "node", Role.MEMBER)

    def ask(client: Client) -> None:
        client.chat("hi").result()

    with pytest.raises(RosterError) as other:
        await with_client(gateway, ask, root_sha256=None)
    assert other.value.reason == "ROOT_PIN"
