"""Agents as they are installed, set up by `sealring connect`, go through a session with their own tools."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from programs import (
    ENDED,
    FOUND,
    INSTALLED,
    KITS,
    NOTES,
    PROGRAMS,
    ROOT,
    WEATHER,
    WRITTEN,
    command,
    cue,
    environment,
    is_installed,
    note,
    scenes,
    weather_scene,
)
from recording import Relay
from ringtest import CLUSTER, HASTY, PROXY_KEY, LocalCluster, give_proxy_key, hasty, proxy, started
from scriptedmodel import write_scripted

pytestmark = [*CLUSTER, pytest.mark.agents]
LIMIT_SECONDS = 300.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Any]]:
    """URLs of a ring of two with the scripted model, in clear and sealed, and where programs work."""
    folder = tmp_path_factory.mktemp("p")
    model, work = folder / "model", folder / "w"
    played = [scene for name in PROGRAMS for scene in scenes(name, work / name)]
    write_scripted(model, [*played, *map(weather_scene, KITS)], ends=400)
    async with LocalCluster(folder / "state", model, nodes=2, name="agent", settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        async with (
            started(cluster, stages=2) as ring,
            proxy(ring, folder / "proxy") as (sealed, _),
            Relay(cluster.http_url) as relay,
        ):
            yield {"clear": relay.url, "sealed": sealed, "work": work, "relay": relay}


async def _run(words: list[str], work: Path, environ: dict[str, str]) -> str:
    """What it prints."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=work,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (printed + errors).decode(errors="replace")[-3000:]
    return printed.decode()


def _end_all_of(home: Path) -> None:
    """Ends what a program has left running in its home."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                process.kill()
        except psutil.Error:
            continue


async def _connect(name: str, url: str, environ: dict[str, str], *way: str) -> None:
    words = [sys.executable, "-P", "-m", "sealring.cli", "connect", name, "--url", url, *way]
    await _run(words, Path(environ["HOME"]), environ)


@pytest.mark.parametrize("way", ["clear", "sealed"])
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_session_with_tools_comes_to_its_end(
    name: str, way: str, served: dict[str, Any], tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    home, work = tmp_path / "h", served["work"] / name
    for folder in (home, work):
        folder.mkdir(parents=True, exist_ok=True)
    for file in work.iterdir():
        file.unlink()
    (work / "notes.txt").write_text(NOTES)
    give_proxy_key(home)
    environ = environment(home, program.environment)
    url = served[way]
    with note(name, way) as row:
        assert is_installed(program), f"{program.package} is not installed"
        await _connect(name, url, environ, "--write")
        try:
            for number, words in enumerate((program.first, program.then), 1):
                names = {"prompt": f"{cue(name, number)}, please.", "model": "agent", "home": str(home)}
                printed = await _run(command(words, **names), work, environ)
                assert (FOUND, ENDED)[number - 1] in printed
        finally:
            _end_all_of(home)
            served["relay"].keep(INSTALLED / "bodies" / f"{name}.jsonl" if way == "clear" else None)
        assert (work / "list.txt").read_text() == WRITTEN
        row["tools"] = program.tools
        await _connect(name, url, environ, "--undo")
        left = [file for file in home.rglob("*") if file.is_file() and "sealring" not in file.parts]
        told = [file for file in left if PROXY_KEY.encode() in file.read_bytes()]
        assert told == [], "the key is left behind"


@pytest.mark.parametrize("way", ["clear", "sealed"])
@pytest.mark.parametrize("name", KITS)
async def test_a_kit_for_node_calls_a_tool_and_goes_on(
    name: str, way: str, served: dict[str, Any], tmp_path: Path
) -> None:
    kit = KITS[name]
    script = shutil.copy(
        ROOT / "tests" / "clients" / "conversations.mjs", INSTALLED
    )  # imports look beside it
    environ = environment(tmp_path, {"API_KEY": PROXY_KEY})
    with note(name, way) as row:
        printed = await _run(["node", str(script), name, "agent", served[way]], tmp_path, environ)
        served["relay"].keep(INSTALLED / "bodies" / f"{name}.jsonl" if way == "clear" else None)
        assert json.loads(printed) == [WEATHER] * kit.conversations
        row["tools"] = kit.tools
