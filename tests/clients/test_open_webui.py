"""Open WebUI's server, set up by `sealring connect`, holds a conversation as its own page has it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from programs import (
    ENDED,
    FOUND,
    HABITS,
    INSTALLED,
    NOTES,
    OPEN_WEBUI,
    WRITTEN,
    cue,
    environment,
    full_scenes,
    note,
)
from ringtest import AGENTS, HANG_SECONDS, give_proxy_key
from scriptedmodel import QUESTION
from scriptedring import NAME, WAYS, Served, beside, connect, run, seeing
from shownpictures import SEEN, SEES

from sealring.mesh.system.addresses import free_port

pytestmark = AGENTS
CONTEXT = 2048
FILLING = " ".join(f"Plum {number} lies in the basket." for number in range(124))
"""So that the question just fits into the context with its answer."""

SUMMARY = "[CONVERSATION SUMMARY]"
"""Open WebUI's, of its own making where the model could not make one."""

SLIM = {
    "USE_SLIM_DOCKER": "true",  # Open WebUI's own: without the models that it would run itself
    "OFFLINE_MODE": "true",
    "WEBUI_SECRET_KEY": "of this test",
}
TASKS = {"title_generation": True, "tags_generation": True, "follow_up_generation": True}
"""Background tasks that the page requests with each answer; the server's settings decide which ones run."""


class Page:
    """One user's page: what it sends to the server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.model = NAME
        self._said: list[dict[str, Any]] = []
        self._last: str | None = None
        self.chat = ""

    def begin(self) -> None:
        """Begins another chat."""
        self._said, self._last, self.chat = [], None, ""

    async def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server answers to a GET, or to a POST of the body."""
        answer = await (self._http.get(path) if body is None else self._http.post(path, json=body))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def log_in(self) -> None:
        """Signs up as the first user, which makes an administrator."""
        user = {"name": "A", "email": "a@home.example", "password": "A-password-1"}
        await self.call("/api/v1/auths/signup", user)
        token = (await self.call("/api/v1/auths/signin", user))["token"]
        self._http.headers["authorization"] = f"Bearer {token}"

    async def upload(self, picture: bytes) -> dict[str, Any]:
        """A PNG that was dropped on the page, as it refers to the file once the server has it."""
        file = {"file": ("picture.png", picture, "image/png")}
        answer = await self._http.post("/api/v1/files/", params={"process": "false"}, files=file)
        assert answer.status_code == 200, answer.text
        kept = answer.json()
        return {
            "type": "file",
            "file": kept,
            "id": kept["id"],
            "url": kept["id"],
            "name": "picture.png",
            "collection_name": "",
            "status": "uploaded",
            "size": len(picture),
            "error": "",
            "content_type": kept["meta"]["content_type"],
        }

    async def ask(self, words: str, *files: dict[str, Any]) -> str:
        """The answer that stands in the chat when it is done, tools having been called."""
        asked, answered = str(uuid.uuid4()), str(uuid.uuid4())
        message = {"role": "user", "content": words} | ({"files": list(files)} if files else {})
        self._said.append(message)
        body = {
            "model": self.model,
            "stream": True,
            "messages": self._said,
            "session_id": "a page",
            "id": answered,
            "parent_id": self._last,
            "user_message": message | {"id": asked, "parentId": self._last, "childrenIds": [answered]},
            "background_tasks": TASKS,
            "params": {"temperature": 0},
        }
        taken = await self.call("/api/chat/completions", body | ({"chat_id": self.chat} if self.chat else {}))
        self.chat, self._last = taken["chat_id"], answered
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                shown = await self.call(f"/api/v1/chats/{self.chat}")
                said = shown["chat"]["history"]["messages"].get(answered, {})
                assert "error" not in said, said
                if said.get("done"):
                    self._said.append({"role": "assistant", "content": said["content"]})
                    return str(said["content"])
                await asyncio.sleep(0.2)

    async def turn_on_title_and_tags(self) -> None:
        settings = await self.call("/api/v1/tasks/config")
        settings |= {"ENABLE_TITLE_GENERATION": True, "ENABLE_TAGS_GENERATION": True}
        await self.call("/api/v1/tasks/config/update", settings)

    async def title_and_tags(self) -> list[str]:
        """What the model says to the two questions about the conversation, or the server in its place."""
        asked = {"model": self.model, "messages": self._said, "chat_id": self.chat}
        paths = [f"/api/v1/tasks/{one}/completions" for one in ("title", "tags")]
        answers = [(await self._http.post(path, json=asked)).json() for path in paths]
        return [one["choices"][0]["message"]["content"] if "choices" in one else str(one) for one in answers]

    async def stream(self, words: str) -> str:
        """A streamed answer, as programs get it that use the server as an API."""
        said = {"model": self.model, "stream": True, "messages": [{"role": "user", "content": words}]}
        answer = await self._http.post("/api/chat/completions", json=said)
        assert answer.status_code == 200, answer.text
        return answer.text


@asynccontextmanager
async def _running(home: Path) -> AsyncIterator[Page]:
    """The server with what is written for it in its environment."""
    port, log = free_port("127.0.0.1"), home / "log"
    command = 'set -a; . "$HOME/.config/sealring/open-webui.env"; exec open-webui serve --host 127.0.0.1'
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f"{command} --port {port}"),
            cwd=home,
            env=environment(home, SLIM | {"DATA_DIR": str(home / "data")}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_SECONDS) as http:
            async with asyncio.timeout(HANG_SECONDS):
                while True:
                    assert process.returncode is None, log.read_text()[-3000:]
                    with contextlib.suppress(httpx.TransportError):
                        if (await http.get("/health")).status_code == 200:
                            break
                    await asyncio.sleep(0.2)
            yield Page(http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("way", WAYS)
async def test_a_conversation_with_tools_comes_to_its_end(way: str, served: Served, tmp_path: Path) -> None:
    give_proxy_key(tmp_path)
    environ = environment(tmp_path, {})
    bodies = INSTALLED / "bodies" / f"{OPEN_WEBUI}.jsonl"
    with note(OPEN_WEBUI, way) as row:
        back = await connect(OPEN_WEBUI, served.urls[way], environ, "--write")
        async with _running(tmp_path) as page:
            await page.log_in()
            assert [one["id"] for one in (await page.call("/api/models"))["data"]] == [NAME]
            found = {"title": "notes", "data": {"content": {"md": NOTES}}, "access_grants": []}
            await page.call("/api/v1/notes/create", found)
            assert FOUND in await page.ask(f"{cue(OPEN_WEBUI, 1)}, please.")
            assert ENDED in await page.ask(f"{cue(OPEN_WEBUI, 2)}, please.")
            notes = {one["title"]: one["data"]["content"]["md"] for one in await page.call("/api/v1/notes/")}
            assert notes == {"notes": NOTES, "A list of plums": WRITTEN}
            assert all("disabled" in one for one in await page.title_and_tags())
            if way == "clear":
                asked = served.relay.keep(bodies)
                assert all(one["body"].get("tools") for one in asked), "it has asked something by itself"
            await page.turn_on_title_and_tags()
            assert await page.title_and_tags() == ['{"title": "Three plums"}', '{"tags": ["plums", "lists"]}']
            assert '"content": "The no"' in await page.stream(f"{cue(OPEN_WEBUI, 3)}, please.")
        row["tools"] = "finds and writes notes"
        await run(["sh", "-c", back], tmp_path, environ)
        assert not (tmp_path / ".config" / "sealring" / "open-webui.env").exists()


@pytest.mark.parametrize("way", WAYS)
async def test_a_chat_goes_on_though_a_title_and_a_summary_no_longer_fit(
    way: str, served: Served, tmp_path: Path
) -> None:
    """The first question fills the context so far that questions about it do not fit."""
    give_proxy_key(tmp_path)
    environ = environment(tmp_path, {})
    with note(f"{OPEN_WEBUI}.full", way) as row:
        async with beside(served, "small", tmp_path / "m", full_scenes(), context=CONTEXT):
            await connect(OPEN_WEBUI, served.urls[way], environ, "--model", "small", "--write")
            async with _running(tmp_path) as page:
                page.model = "small"
                await page.log_in()
                await page.turn_on_title_and_tags()
                assert FOUND in await page.ask(f"{cue(OPEN_WEBUI, 4)}, please. {FILLING}")
                for refused in await page.title_and_tags():
                    assert "context_length_exceeded" in refused, refused
                for _ in range(2):
                    assert ENDED in await page.ask(f"{cue(OPEN_WEBUI, 5)}, please.")
            if way == "clear":
                asked = served.relay.keep(INSTALLED / "bodies" / f"{OPEN_WEBUI}.full.jsonl")
                chats = [str(one["body"]["messages"]) for one in asked if one["body"].get("stream")]
                assert [SUMMARY in chat for chat in chats].count(True) == 2, "it still sends the whole chat"
        row["tools"] = HABITS[f"{OPEN_WEBUI}.full"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_picture_of_a_chat_is_seen(way: str, served: Served, tmp_path: Path) -> None:
    give_proxy_key(tmp_path)
    environ = environment(tmp_path, {})
    with note(f"{OPEN_WEBUI}.picture", way) as row:
        async with seeing(served):
            await connect(OPEN_WEBUI, served.urls[way], environ, "--model", SEES, "--write")
            async with _running(tmp_path) as page:
                page.model = SEES
                await page.log_in()
                for picture, answer in SEEN.items():
                    page.begin()
                    assert await page.ask(QUESTION, await page.upload(picture)) == answer
        row["tools"] = HABITS[f"{OPEN_WEBUI}.picture"]
