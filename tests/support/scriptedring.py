"""A real ring with the scripted model, before which the programs of `make clients` are run."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from programs import (
    CAPITAL,
    KITS,
    NOTES,
    PROGRAMS,
    SURVIVORS,
    environment,
    long_scenes,
    model_scenes,
    open_webui_scenes,
    scenes,
    weather_scene,
)
from recording import Relay
from ringtest import HANG_SECONDS, HASTY, PROXY_KEY, LocalCluster, Ring, give_proxy_key, hasty, proxy, started
from scriptedmodel import Scene, write_scripted
from shownpictures import SEES

from sealring.cli.calls.waiting import wait_until_serving
from sealring.node.models.folders import bundled_model

WAYS = ("clear", "sealed")
_KEY = {"authorization": f"Bearer {PROXY_KEY}"}
NAME = "agent"
"""The deployment."""


@dataclass(frozen=True)
class Served:
    """The ring's addresses for programs, and the folder below which they work.

    `relay` keeps what they send in clear.
    """

    ring: Ring
    urls: dict[str, str]
    model: Path
    work: Path
    relay: Relay


@asynccontextmanager
async def serving_script(folder: Path, scenes: Sequence[Scene]) -> AsyncIterator[Served]:
    """A ring of two that plays the scenes, in clear and through a proxy."""
    model = folder / "model"
    write_scripted(model, scenes, ends=400)
    async with LocalCluster(folder / "state", model, nodes=2, name=NAME, settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        async with (
            started(cluster, stages=2) as ring,
            proxy(ring, folder / "proxy") as (sealed, _),
            Relay(cluster.http_url) as relay,
        ):
            yield Served(ring, {"clear": relay.url, "sealed": sealed}, model, folder / "w", relay)


def all_scenes(work: Path) -> list[Scene]:
    """What the model says to every program, each of which works in a folder below `work`."""
    played = [scene for name in PROGRAMS for scene in scenes(name, work / name)]
    played += [scene for name in SURVIVORS for scene in long_scenes(name, work / name)]
    return [*played, *model_scenes(), *map(weather_scene, KITS), *open_webui_scenes(), CAPITAL]


@asynccontextmanager
async def beside(
    served: Served,
    name: str,
    folder: Path,
    scenes: Sequence[Scene],
    *,
    context: int,
    ends: int = 0,
    sees: bool = False,
    notation: str = "json_tools",
) -> AsyncIterator[None]:
    """A second deployment on the same nodes. The options are those of `write_scripted`."""
    write_scripted(folder, scenes, context=context, ends=ends, sees=sees, notation=notation)
    async with _deployed(served, name, folder):
        yield


def seeing(served: Served) -> AbstractAsyncContextManager[None]:
    """The bundled model that sees, as a second deployment on the same nodes."""
    return _deployed(served, SEES, bundled_model(SEES))


@asynccontextmanager
async def _deployed(served: Served, name: str, folder: Path) -> AsyncIterator[None]:
    admin = served.ring.cluster.admin
    spec = {"name": name, "model": str(folder), "stages": 2}
    await admin.call("CreateDeployment", spec=spec, seconds=HANG_SECONDS)
    try:
        await wait_until_serving(admin, name, seconds=HANG_SECONDS)
        await _listed(served, name, True)
        yield
    finally:
        await admin.call("DeleteDeployment", name=name)
        await _listed(served, name, False)


async def _listed(served: Served, name: str, wanted: bool) -> None:
    """Returns when gateway and proxy list this model, or do not."""
    async with asyncio.timeout(HANG_SECONDS), httpx.AsyncClient(headers=_KEY, timeout=HANG_SECONDS) as http:
        for url in served.urls.values():
            while True:
                listed = {one["id"] for one in (await http.get(f"{url}/v1/models")).json()["data"]}
                if (name in listed) is wanted:
                    break
                await asyncio.sleep(0.1)


def prepared(served: Served, name: str, folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """A program's home in this folder, its working folder with the notes that the scenes name and nothing of
    an earlier test, and its environment."""
    home, work = folder / "h", served.work / name
    for each in (home, work):
        each.mkdir(parents=True, exist_ok=True)
    for file in work.iterdir():
        file.unlink()
    (work / "notes.txt").write_text(NOTES)
    give_proxy_key(home)
    return home, work, environment(home, PROGRAMS[name].environment)


async def run(words: Sequence[str], work: Path, environ: dict[str, str]) -> str:
    """What a program prints. Fails with the end of it if the program does."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=work,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(HANG_SECONDS):
            printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (printed + errors).decode(errors="replace")[-3000:]
    return printed.decode()


async def connect(name: str, url: str, environ: dict[str, str], *way: str) -> str:
    """`sealring connect` in a program's home. Returns what takes the settings out, as the command says."""
    words = [sys.executable, "-P", "-m", "sealring.cli", "connect", name, "--url", url, *way]
    said = await run(["sh", "-c", f"{shlex.join(words)} 2>&1"], Path(environ["HOME"]), environ)
    return "\n".join(re.findall("to take the settings out: (.*)", said))


def end_all_of(home: Path) -> None:
    """Ends what a program has left running in its home."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                process.kill()
        except psutil.Error:
            continue
