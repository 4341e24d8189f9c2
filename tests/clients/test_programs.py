"""Agents as they are installed, set up by `sealring connect`, go through a session with their own tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from programs import (
    ENDED,
    FOUND,
    INSTALLED,
    KITS,
    PROGRAMS,
    ROOT,
    WEATHER,
    WRITTEN,
    command,
    cue,
    environment,
    is_installed,
    note,
)
from recording import Relay
from ringtest import AGENTS, PROXY_KEY
from scriptedring import NAME, WAYS, Served, connect, end_all_of, prepared, run

pytestmark = AGENTS


async def converse(name: str, home: Path, work: Path, environ: dict[str, str]) -> None:
    """A program's session, in which it reads a file, writes one and runs a command on it."""
    for number, words in enumerate((PROGRAMS[name].first, PROGRAMS[name].then), 1):
        names = {"prompt": f"{cue(name, number)}, please.", "model": NAME, "home": str(home)}
        printed = await run(command(words, **names), work, environ)
        assert (FOUND, ENDED)[number - 1] in printed
    assert (work / "list.txt").read_text() == WRITTEN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_session_with_tools_comes_to_its_end(
    name: str, way: str, served: Served, tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    home, work, environ = prepared(served, name, tmp_path)
    url = served.urls[way]
    with note(name, way) as row:
        assert is_installed(program), f"{program.package} is not installed"
        back = await connect(name, url, environ, "--write")
        try:
            await converse(name, home, work, environ)
        finally:
            end_all_of(home)
            if way == "clear":
                served.relay.keep(INSTALLED / "bodies" / f"{name}.jsonl")
        row["tools"] = program.tools
        await run(["sh", "-c", back], home, environ)
        left = [file for file in home.rglob("*") if file.is_file() and "sealring" not in file.parts]
        told = [file for file in left if PROXY_KEY.encode() in file.read_bytes()]
        assert told == [], "the key is left behind"


@pytest.mark.parametrize("way", WAYS)
async def test_codex_has_its_session_over_websockets(way: str, served: Served, tmp_path: Path) -> None:
    home, work, environ = prepared(served, "codex", tmp_path)
    async with Relay(served.urls[way]) as relay:
        await connect("codex", relay.url, environ, "--write")
        with (home / ".codex" / "sealring.config.toml").open("a") as settings:
            settings.write("supports_websockets = true\n")
        await converse("codex", home, work, environ)
        asked = {line for line in relay.first_lines() if "/v1/responses" in line}
    assert asked == {"GET /v1/responses HTTP/1.1"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KITS)
async def test_a_kit_for_node_calls_a_tool_and_goes_on(
    name: str, way: str, served: Served, tmp_path: Path
) -> None:
    kit = KITS[name]
    script = shutil.copy(
        ROOT / "tests" / "clients" / "conversations.mjs", INSTALLED
    )  # imports look beside it
    environ = environment(tmp_path, {"API_KEY": PROXY_KEY})
    with note(name, way) as row:
        printed = await run(["node", str(script), name, NAME, served.urls[way]], tmp_path, environ)
        if way == "clear":
            served.relay.keep(INSTALLED / "bodies" / f"{name}.jsonl")
        assert json.loads(printed) == [WEATHER] * kit.conversations
        row["tools"] = kit.tools
