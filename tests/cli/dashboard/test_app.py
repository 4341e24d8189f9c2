"""The dashboard's pages and data: users that may see them, and requests of other sites that are refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from commands import Coordinator
from starlette.responses import PlainTextResponse

from sealring.cli.dashboard import app
from sealring.edge.http import server
from sealring.mesh.errors import Unavailable
from sealring.testing import PaperCluster
from sealring.v1 import admin_pb2, inference_pb2

TOKEN = {"authorization": "Bearer secret"}


class Client:
    async def rings(self) -> list[Any]:
        member = SimpleNamespace(id="a", level="software", layers=(0, 4))
        ring = SimpleNamespace(
            id="demo-0", deployment="demo", min_trust=10, clear_links=False, members=[member]
        )
        return [ring]


def traced(asked: Any) -> Any:
    if asked.ring == "down":
        raise Unavailable("no such ring serves", reason="RING_DOWN")
    answer = admin_pb2.TraceRingResponse(ring=asked.ring, duration=1000)
    answer.members.add(rank=0, name=asked.ring[:8])
    return answer


@pytest.fixture(scope="module")
def paper() -> PaperCluster:
    return PaperCluster()


@pytest.fixture
def made(paper: PaperCluster) -> Any:
    async def metrics() -> str:
        return 'sealring_num_requests_running{model_name="demo"} 3\n'

    roster = admin_pb2.GetAdminRosterResponse(root_metadata=paper.root_chain, roster=paper.envelope)
    code = admin_pb2.ShowJoinCodeResponse(code="4076192", expires=5, uses=2)
    admin: Any = Coordinator(TraceRing=traced, GetRoster=roster, ShowJoinCode=code)

    async def usage(since: str) -> inference_pb2.GetUsageResponse:
        row = inference_pb2.Usage(day="2026-11-30", key="a", model="demo", requests=2, answered_tokens=7)
        key = inference_pb2.KeyUsage(key="a", label="laptop", tokens_a_day=9, tokens_today=7)
        return inference_pb2.GetUsageResponse(usage=[row], keys=[key])

    gateways: Any = [
        SimpleNamespace(address=f"127.0.0.1:{port}", metrics=metrics, usage=usage) for port in (1, 2)
    ]
    stand_in: Any = Client()
    edge = PlainTextResponse("the chat's edge")
    made, _ = app.create_dashboard(admin, bytes.fromhex(paper.pin), gateways, stand_in, edge, "secret")
    return made


@pytest.fixture
async def browser(made: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://x") as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css"])
async def test_pages_are_anybodys_and_ask_nobody_else(browser: httpx.AsyncClient, path: str) -> None:
    page = await browser.get(path)
    assert page.status_code == 200
    assert len(page.content) > 100
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "img-src data:;" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert (page.headers["cache-control"], page.headers["referrer-policy"]) == ("no-store", "no-referrer")


@pytest.mark.parametrize("path", ["/data/cluster", "/data/rings", "/v1/chat/completions", "/page.html"])
async def test_everything_else_needs_the_token(browser: httpx.AsyncClient, path: str) -> None:
    for shown in ({}, {"authorization": "Bearer secreT"}, {"authorization": "secret"}):
        refused = await browser.get(path, headers=shown)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "bad_token"
        assert refused.headers["x-content-type-options"] == "nosniff"
    assert (await browser.get(path, headers=TOKEN)).status_code == 200


async def test_data_is_what_was_looked_at(browser: httpx.AsyncClient, paper: PaperCluster) -> None:
    async def told(path: str) -> Any:
        return (await browser.get(path, headers=TOKEN)).json()

    assert (await told("/data/cluster"))["root"] == paper.pin
    (ring,) = await told("/data/rings")
    assert (ring["ring"], ring["min_trust"], ring["clear_links"]) == ("demo-0", "software", False)
    assert ring["members"] == [{"id": "a", "level": "software", "layers": [0, 4]}]
    load = await told("/data/load")
    running = [(one["gateway"], one["running"]) for one in load["gateways"]]
    assert running == [("127.0.0.1:1", 3), ("127.0.0.1:2", 3)]
    assert load["history"] == {"demo": [[0.0, 0.0, 6.0, 0.0, None]]}
    used = await told("/data/usage")
    assert (used["days"][0]["answered_tokens"], used["keys"][0]["label"]) == (14, "laptop")
    assert (used["quotas"][0]["tokens_today"], used["trouble"]) == (7, "")
    assert await told("/data/join") == {"code": "407-6192", "expires": 5, "uses": 2, "trouble": ""}
    assert (await browser.get("/v1/x", headers=TOKEN)).text == "the chat's edge"


async def test_a_crowd_without_the_token_ends_no_look(
    paper: PaperCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the browser's own address, as other accounts of this machine have it."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    asked, answered = asyncio.Event(), asyncio.Event()

    class Slow:
        async def rings(self) -> list[Any]:
            asked.set()
            await answered.wait()
            return []

    stand_in: Any = Slow()
    admin: Any = Coordinator()
    made, _ = app.create_dashboard(
        admin, bytes.fromhex(paper.pin), [], stand_in, PlainTextResponse(""), "secret"
    )
    http = server.HttpServer(made)
    port = http.listen("127.0.0.1:0")
    await http.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as browser:
        looking = asyncio.create_task(browser.get("/data/rings", headers=TOKEN))
        await asked.wait()
        strangers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(30)]
        async with httpx.AsyncClient() as stranger:
            assert (await stranger.get(f"http://127.0.0.1:{port}/data/rings")).status_code == 401
        answered.set()
        assert (await looking).json() == []
    for one in strangers:
        one.close()
    await http.stop()


@pytest.mark.parametrize(
    ("query", "status", "told"),
    [
        ("?ring=demo-0", 200, "demo-0"),
        (f"?ring={'r' * 128}", 200, "r" * 8),
        (f"?ring={'r' * 129}", 400, "bad_ring"),
        ("?ring=", 400, "bad_ring"),
        ("", 400, "bad_ring"),
        ("?ring=down", 503, "ring_down"),
    ],
)
async def test_a_trace_is_of_a_ring_that_is_named(
    browser: httpx.AsyncClient, query: str, status: int, told: str
) -> None:
    answer = await browser.get(f"/data/trace{query}", headers=TOKEN)
    assert (answer.status_code, told in answer.text) == (status, True)


async def test_what_is_no_request_is_not_answered(made: Any) -> None:
    async def nobody(*_: Any) -> None:
        raise AssertionError

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer secret")]
    await made({"type": "websocket", "path": "/", "headers": headers}, nobody, send)
    assert sent == [{"type": "websocket.close"}]


def test_every_run_has_a_token_of_its_own() -> None:
    assert len({app.new_token() for _ in range(9)}) == 9
    assert len(app.new_token()) >= 40


async def test_the_scripts_find_what_they_fill_and_each_other(browser: httpx.AsyncClient) -> None:
    page = (await browser.get("/")).text
    found = set(re.findall(r'\bid="(\w[\w-]*)"', page))
    waiting, scripts = ["page.js"], dict[str, str]()
    while waiting:
        name = waiting.pop()
        answer = await browser.get(f"/{name}")
        assert answer.status_code == 200
        scripts[name] = answer.text
        waiting += [one for one in re.findall(r'from "./(\w+\.js)"', answer.text) if one not in scripts]
    assert set(scripts) == {one.name for one in Path(app.__file__).parent.glob("*.js")}
    used = {
        one for text in scripts.values() for one in re.findall(r'\b(?:element|show)\(\s*"([\w-]+)"', text)
    }
    assert used <= found
    assert not any("innerHTML =" in text or "insertAdjacent" in text for text in scripts.values())
