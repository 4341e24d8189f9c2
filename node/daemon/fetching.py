"""Brings models onto this machine: from a member that has them, else from the Hugging Face hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from sealring.mesh.errors import (
    FailedPrecondition,
    InvalidInput,
    ModelError,
    NotFound,
    SealringError,
    Unavailable,
)
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.system.files import write_atomic
from sealring.node.daemon.supervisor import Child, variables
from sealring.node.models.asking import ModelAsker, Needs
from sealring.node.models.fetch import WANTED
from sealring.node.models.folders import HUB_ID, NAME, local_model, not_found
from sealring.node.models.kept import check_commit, commit_of, is_part, note_of
from sealring.node.models.landing import Landing, places
from sealring.v1 import engine_pb2, membership_pb2

log = structlog.get_logger()

FETCH_MODULE = "sealring.node.models.fetch"
_FOR_HUB = (
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"),
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
)
"""What only the process that asks the hub gets, its token among it."""

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_MAX_PROBLEM = 500
_TELL_SECONDS = 1.0
MAX_MODELS = 64
"""So many are told of."""


@dataclass(frozen=True)
class Held:
    """A model folder: its name, its bytes, those that are here, and whether it was fetched."""

    name: str
    size: int
    done: int
    fetched: bool


@dataclass
class Pull:
    """One model on its way: bytes that are here and of how many; `problem` once it has failed."""

    name: str
    done: int = 0
    size: int = 0
    problem: str = ""


async def no_layers(path: Path) -> list[tuple[str, int, int]]:
    """What is needed of the weights to plan with a model: nothing beside their headers."""
    return []


class Fetcher:
    """One model at a time. Fetched models lie in `home`, and only they can be removed."""

    def __init__(
        self, folders: Sequence[Path], home: Path, asker: ModelAsker | None, *, allowed: bool
    ) -> None:
        """`folders` are all that are looked into for models, `home` among them."""
        self._folders = folders
        self._home = home
        self._asker = asker
        self.allowed = allowed
        self.pulls: dict[str, Pull] = {}
        self._held: list[Held] = []
        self._found: dict[Path, tuple[Held, bool, tuple[int, int]]] = {}
        self._turn = asyncio.Lock()
        self._running: dict[tuple[str, bool], asyncio.Task[Path]] = {}
        """By the model's name, and whether it is all of it that is asked for."""

    def begin(self, name: str, needs: Needs | None = None, commit: str = "") -> asyncio.Task[Path]:
        """Begins to bring a model here, or what `needs` asks of it, or joins what is under way.

        What comes from the hub is as it was at `commit`, else at that of what is here, else as it is.

        Raises FailedPrecondition (DOWNLOADS_NOT_ALLOWED), InvalidInput (BAD_MODEL_NAME).
        """
        if not self.allowed:
            raise FailedPrecondition(
                "this node's owner does not allow that models are fetched",
                hint="set allow_downloads on the node, or copy the model there",
                reason="DOWNLOADS_NOT_ALLOWED",
            )
        key = _checked(name), needs is None
        if key not in self._running:
            pull = self.pulls[name] = Pull(name)
            task = asyncio.get_running_loop().create_task(self._fetch(pull, needs, commit))
            self._running[key] = task
            task.add_done_callback(partial(self._over, key, pull))
        return self._running[key]

    def _under_way(self, name: str) -> list[asyncio.Task[Path]]:
        return [task for (one, _), task in self._running.items() if one == name]

    async def fetch(
        self,
        name: str,
        needs: Needs | None = None,
        commit: str = "",
        progress: Callable[[float], None] = lambda share: None,
    ) -> Path:
        """The folder of a model, which is brought here first; with `needs` what that asks of it, where a
        member has that. Who gives up waiting does not end it.

        Raises as `begin`, NotFound, ResourceExhausted (DISK_FULL), Unavailable, ConfigError.
        """
        while under_way := self._under_way(name):  # perhaps for something else of it, or another commit
            await self._wait(name, under_way, progress)
        task = self.begin(name, needs, commit)
        while not task.done():
            await self._wait(name, (task,), progress)
        return await asyncio.shield(task)

    async def _wait(
        self, name: str, tasks: Sequence[asyncio.Task[Path]], progress: Callable[[float], None]
    ) -> None:
        await asyncio.wait(tasks, timeout=_TELL_SECONDS)
        pull = self.pulls.get(name)
        progress(pull.done / pull.size if pull is not None and pull.size else 0.0)

    def place(self, name: str) -> Path:
        """Where a model lies once it has been fetched."""
        return self._home / name

    async def remove(self, name: str) -> None:
        """Deletes a model that was fetched, or what has come of it.

        Raises NotFound (MODEL_NOT_FOUND), InvalidInput (BAD_MODEL_NAME), and FailedPrecondition
        (MODEL_NOT_FETCHED_HERE) for a folder that the owner put there.
        """
        tasks = self._under_way(_checked(name))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.pulls.pop(name, None)
        partial, target = places(self._home, name)
        if not partial.exists() and not target.exists():
            found = await asyncio.to_thread(local_model, name, self._folders)
            if found is None:
                raise not_found(name, "list what there is: sealring model list")
            raise FailedPrecondition(
                f"{name} was not fetched by sealring",
                hint=f"remove it there by hand: {found}",
                reason="MODEL_NOT_FETCHED_HERE",
            )
        await asyncio.to_thread(_delete, partial, target)

    def messages(self) -> list[membership_pb2.HeldModel]:
        """The models that are here, as they were when `look` looked, and those on their way."""
        coming = {pull.name: pull for pull in self.pulls.values()}
        here = [
            membership_pb2.HeldModel(name=one.name, size=one.size, done=one.done, fetched=one.fetched)
            for one in self._held
            if one.name not in coming
        ]
        return [
            *(
                membership_pb2.HeldModel(
                    name=one.name, size=one.size, done=min(one.done, one.size), problem=one.problem
                )
                for one in coming.values()
            ),
            *here,
        ][:MAX_MODELS]

    async def look(self) -> None:
        """Looks for model folders."""
        self._held = await asyncio.to_thread(self._look)

    def _look(self) -> list[Held]:
        """Model folders by the name that `local_model` finds them by, at most MAX_MODELS. What is in a folder
        is looked at when a file came or went, until its size stays."""
        found: dict[Path, tuple[Held, bool, tuple[int, int]]] = {}
        names: set[str] = set()
        for folder in self._folders:
            for config in sorted((*folder.glob("*/config.json"), *folder.glob("*/*/config.json"))):
                path = config.parent
                name = path.relative_to(folder).as_posix()
                if name in names or not (HUB_ID.fullmatch(name) or NAME.fullmatch(name)):
                    continue
                if len(names) == MAX_MODELS:
                    break
                names.add(name)
                with contextlib.suppress(OSError):
                    times = path.stat().st_mtime_ns, config.stat().st_mtime_ns
                    held, settled, before = self._found.get(path, (None, False, times))
                    if held is None or not settled or before != times:
                        now = _look_into(path, name, folder == self._home)
                        held, settled = now, now == held  # a file that grows is no change of its folder
                    found[path] = held, settled, times
        self._found = found
        return [held for held, _, _ in found.values()]

    async def stop(self) -> None:
        """Ends what is under way; it goes on from there the next time."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _over(self, key: tuple[str, bool], pull: Pull, task: asyncio.Task[Path]) -> None:
        del self._running[key]
        if task.cancelled() or task.exception() is None:
            if self.pulls.get(pull.name) is pull:
                del self.pulls[pull.name]
        else:
            error = task.exception()
            told = str(error) if isinstance(error, SealringError) else "an internal error"
            pull.problem = "".join(one if one.isprintable() else " " for one in told)[:_MAX_PROBLEM]
            log.warning("model_not_fetched", model=pull.name, why=pull.problem)

    async def _fetch(self, pull: Pull, needs: Needs | None, commit: str) -> Path:
        name = pull.name
        async with self._turn:
            found = await asyncio.to_thread(_whole, name, (self._home, *self._folders))
            if found is not None:
                note = await asyncio.to_thread(note_of, found)
                check_commit(name, commit_of(found, note), commit)
                return found
            landing = await asyncio.to_thread(Landing, self._home, name)
            await asyncio.to_thread(landing.prepare)

            def progress(done: int, size: int) -> None:
                pull.done, pull.size = done, size

            if self._asker is None or not await self._asker.fetch(name, landing, progress, needs, commit):
                await self._from_hub(name, landing, pull, needs, commit)
            found = await asyncio.to_thread(landing.publish)
        await self.look()
        log.info("model_fetched", model=name, size=pull.size)
        return found

    async def _from_hub(
        self, name: str, landing: Landing, pull: Pull, needs: Needs | None, commit: str
    ) -> None:
        if HUB_ID.fullmatch(name) is None:
            raise not_found(name, "no member has it; the hub's models are named org/name")
        options = ["--commit", commit] if commit else []
        if needs is None:
            await self._ask_hub(name, pull, *options)
            return
        await self._ask_hub(name, pull, "--part", *options)
        ranges = json.dumps(await needs(landing.path)).encode()
        await asyncio.to_thread(write_atomic, landing.path / WANTED, ranges)
        await self._ask_hub(name, pull, "--part", *options)

    async def _ask_hub(self, name: str, pull: Pull, *options: str) -> None:
        """By a process of its own. Raises what it says."""
        ended, problems = asyncio.Event(), []

        def heard(body: bytes) -> None:
            event = engine_pb2.HubEvent.FromString(body)
            if event.HasField("problem"):
                problems.append(from_problem(event.problem))
            if event.size:
                pull.done, pull.size = event.done, event.size

        child = await Child.spawn(
            "fetch",
            ["-m", FETCH_MODULE, name, "--home", str(self._home), *options],
            on_message=heard,
            on_end=ended.set,
            environment={**_QUIET, **variables(_FOR_HUB)},
        )
        try:
            await ended.wait()
        finally:
            status = await child.stop()
        if problems:
            raise problems[0]
        if status:
            raise Unavailable(
                "the process that fetches ended", hint="see the node's log", reason="MODEL_NOT_FETCHED"
            )


def _checked(name: str) -> str:
    if ".." in name or (HUB_ID.fullmatch(name) is None and NAME.fullmatch(name) is None):
        raise InvalidInput(
            f"{name[:80]!r} is no name of a model that can be fetched",
            hint="name a hub id org/name, or a folder as members call it",
            reason="BAD_MODEL_NAME",
            param="model",
        )
    return name


def _whole(name: str, folders: Sequence[Path]) -> Path | None:
    """The first folder that holds all of a model: a part may lie before it."""
    for folder in folders:
        with contextlib.suppress(NotFound):
            found = local_model(name, [folder])
            if found is not None and not is_part(found):
                return found
    return None


def _look_into(folder: Path, name: str, fetched: bool) -> Held:
    try:
        note = note_of(folder)
    except ModelError:
        note = None
    if note is not None:
        return Held(name, note.manifest.size, note.done, fetched)
    size = _size(folder)
    return Held(name, size, size, fetched)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder that others write to meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


def _delete(partial: Path, target: Path) -> None:
    """Out of sight first: nothing half deleted is ever found by its name."""
    shutil.rmtree(partial, ignore_errors=True)
    if target.is_dir():
        partial.parent.mkdir(mode=0o700, exist_ok=True)
        target.rename(partial)
        shutil.rmtree(partial)
