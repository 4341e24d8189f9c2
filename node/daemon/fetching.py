"""Fetches models to this machine: from a member that has them, otherwise from the Hugging Face hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import structlog

from sealring.mesh.clock import awake_clock
from sealring.mesh.errors import (
    Conflict,
    FailedPrecondition,
    InvalidInput,
    ModelError,
    NotFound,
    SealringError,
    Unavailable,
)
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.system.backups import leave_out
from sealring.mesh.system.files import write_atomic
from sealring.mesh.system.pace import FETCHING, Pace, Reached
from sealring.node.daemon.supervisor import Child, variables
from sealring.node.models.asking import NOT_GIVEN, ModelAsker, Needs
from sealring.node.models.fetch import WANTED
from sealring.node.models.folders import (
    CONFIGURATIONS,
    HUB_ID,
    NAME,
    local_model,
    models_in,
    not_found,
    unreadable,
)
from sealring.node.models.kept import check_commit, commit_of, is_part, note_of
from sealring.node.models.partial_model import PartialModel, places
from sealring.v1 import engine_pb2, membership_pb2

log = structlog.get_logger()

FETCH_MODULE = "sealring.node.models.fetch"
_FOR_HUB = (
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"),
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
)
"""Variables for the process that asks the hub, and no other; the user's token is one of them."""

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_MAX_PROBLEM = 500
_TELL_SECONDS = 1.0
_LISTEN_SECONDS = 10.0
_LET_GO_SECONDS = 10.0
SILENT_SECONDS = 600.0
"""A child that fetches sends an event every few seconds, between two tries of a request after 150 s."""

FAILED_SECONDS = 86400.0
"""For which heartbeats have a fetch that failed; `model remove` ends it at once."""

MAX_MODELS = 64
"""Most models in one heartbeat."""


@dataclass(frozen=True)
class Held:
    """A model folder: its name, the model's bytes, its bytes that are here, and whether it was fetched or
    linked, so that `remove` takes it."""

    name: str
    size: int
    done: int
    fetched: bool


@dataclass
class Pull:
    """The fetch of one model: bytes that are here, bytes in all (0 until it is known which are wanted), and a
    `problem` once it has failed, with the time at which it did."""

    name: str
    done: int = 0
    size: int = 0
    problem: str = ""
    failed: float = 0.0
    pace: Pace = field(default_factory=lambda: Pace(awake_clock))

    def reached(self) -> Reached:
        """How far it is, told at least every second."""
        return self.pace.at(FETCHING, self.done, self.size)

    def message(self) -> membership_pb2.HeldModel:
        """The entry in a heartbeat."""
        now = self.reached()
        return membership_pb2.HeldModel(
            name=self.name,
            size=self.size,
            done=min(now.done, self.size or now.done),
            problem=self.problem,
            coming=not self.problem,
            rate=0 if self.problem else now.rate,
            seconds_left=0 if self.problem else now.seconds_left,
        )


async def no_layers(path: Path) -> list[tuple[str, int, int]]:
    """The ranges of weights that a plan needs: none, as the headers are fetched in any case."""
    return []


class Fetcher:
    """Fetches one model at a time into `home`, and removes models that it has fetched."""

    def __init__(
        self, folders: Sequence[Path], home: Path, asker: ModelAsker | None, *, linked: Path, allowed: bool
    ) -> None:
        """`folders` are all folders of models, among them `home` and that of the links, `linked`."""
        self._folders = folders
        self._home = home
        self._linked = linked
        self._asker = asker
        self.allowed = allowed
        self.pulls: dict[str, Pull] = {}
        self._held: list[Held] = []
        self._found: dict[Path, tuple[Held, bool, tuple[int, int]]] = {}
        self._unread: dict[Path, str] = {}
        self._removing: set[Path] = set()
        self._ending: set[asyncio.Task[int]] = set()
        self._turn = asyncio.Lock()
        self._running: dict[tuple[str, bool], asyncio.Task[Path]] = {}
        """Fetches under way, by the name of the model and whether the whole model is wanted."""

    def begin(self, name: str, needs: Needs | None = None, commit: str = "") -> asyncio.Task[Path]:
        """Starts to fetch a model, or the ranges that `needs` returns, or joins the fetch under way.

        The hub's files are those at `commit`; by default at the commit of the parts that are here, or the
        newest one.

        Raises FailedPrecondition (DOWNLOADS_NOT_ALLOWED), InvalidInput (BAD_MODEL_NAME).
        """
        if not self.allowed:
            raise FailedPrecondition(
                "this node's owner does not allow downloads of models",
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
        progress: Callable[[Reached], None] = lambda reached: None,
    ) -> Path:
        """Fetches a model, or the ranges that `needs` returns, and returns its folder. The fetch goes on when
        its caller is cancelled. `progress` hears every second how far it is.

        Raises as `begin`, NotFound, ResourceExhausted (DISK_FULL), Unavailable, ConfigError.
        """
        while under_way := self._under_way(name):  # it may be for other ranges or another commit
            await self._wait(name, under_way, progress)
        task = self.begin(name, needs, commit)
        while not task.done():
            await self._wait(name, (task,), progress)
        return await asyncio.shield(task)

    async def _wait(
        self, name: str, tasks: Sequence[asyncio.Task[Path]], progress: Callable[[Reached], None]
    ) -> None:
        await asyncio.wait(tasks, timeout=_TELL_SECONDS)
        if (pull := self.pulls.get(name)) is not None:
            progress(pull.reached())

    def place(self, name: str) -> Path:
        """The folder of a model that has been fetched."""
        return self._home / name

    def leaves(self, path: Path) -> bool:
        """Whether a folder is about to be deleted; looks at the disk."""
        return any(_same(path, one) for one in tuple(self._removing))

    async def remove(self, name: str, in_use: Callable[[], Sequence[Path]] = lambda: ()) -> None:
        """Deletes a fetched model, or the parts of it that are here, unless its folder is `in_use`. Of a
        model of another program only the link is removed.

        Raises Conflict (MODEL_IN_USE), NotFound (MODEL_NOT_FOUND), InvalidInput (BAD_MODEL_NAME), and
        FailedPrecondition (MODEL_NOT_FETCHED_HERE) for a folder that the owner put there.
        """
        here = {self.place(_checked(name)), self._linked / name}
        self._removing |= here  # an epoch that prepares from now on does not find it
        used = in_use()
        try:
            if await asyncio.to_thread(lambda: any(_same(*one) for one in product(here, used))):
                raise Conflict(
                    f"{name} is being served", hint="delete its deployment first", reason="MODEL_IN_USE"
                )
            await self._remove(name)
        finally:
            self._removing -= here

    async def _remove(self, name: str) -> None:
        tasks = self._under_way(name)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        failed = self.pulls.pop(name, None)
        partial, target = places(self._home, name)
        async with self._turn:  # no fetch writes to the folder meanwhile
            unlinked = await asyncio.to_thread(_unlink, self._linked / name)
            if partial.exists() or target.exists():
                await asyncio.to_thread(_delete, partial, target)
                return
        if unlinked:
            return
        found = await asyncio.to_thread(local_model, name, self._folders)
        if found is None:
            if failed is not None:
                return
            raise not_found(name, "list models: sealring model list")
        raise FailedPrecondition(
            f"{name} was not fetched by sealring",
            hint=f"remove it there by hand: {found}",
            reason="MODEL_NOT_FETCHED_HERE",
        )

    def messages(self) -> list[membership_pb2.HeldModel]:
        """At most MAX_MODELS models: those being fetched, those here at the last `look`, and last those whose
        fetch failed without a part here."""
        here = {
            one.name: membership_pb2.HeldModel(
                name=one.name, size=one.size, done=one.done, fetched=one.fetched
            )
            for one in self._held
        }
        old = awake_clock() - FAILED_SECONDS
        self.pulls = {name: one for name, one in self.pulls.items() if not one.problem or one.failed > old}
        pulls = {one.name: one.message() for one in self.pulls.values()}
        coming = {name: message for name, message in pulls.items() if not message.problem}
        held = {name: pulls.get(name, message) for name, message in here.items()}
        return list((coming | held | pulls).values())[:MAX_MODELS]

    async def look(self) -> None:
        """Lists model folders for `messages`."""
        self._held = await asyncio.to_thread(self._look)

    def _look(self) -> list[Held]:
        """At most MAX_MODELS model folders, by the names for `local_model`. A folder is measured again after
        a change of its files, until its size stays the same."""
        found: dict[Path, tuple[Held, bool, tuple[int, int]]] = {}
        names: set[str] = set()
        for folder in self._folders:
            for path in self._models_in(folder):
                name = path.relative_to(folder).as_posix()
                if name in names or not (HUB_ID.fullmatch(name) or NAME.fullmatch(name)):
                    continue
                if len(names) == MAX_MODELS:
                    break
                names.add(name)
                with contextlib.suppress(OSError):
                    own = next(path / name for name in CONFIGURATIONS if (path / name).exists())
                    times = path.stat().st_mtime_ns, own.stat().st_mtime_ns
                    held, settled, before = self._found.get(path, (None, False, times))
                    if held is None or not settled or before != times:
                        now = _look_into(path, name, folder in (self._home, self._linked))
                        held, settled = now, now == held  # a growing file does not change its folder's time
                    found[path] = held, settled, times
        self._found = found
        return [held for held, _, _ in found.values()]

    def _models_in(self, folder: Path) -> list[Path]:
        """The model folders in a folder; none if it cannot be read, which is logged once."""
        why = ""
        try:
            return models_in(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            why = unreadable(folder, error).message
            return []
        finally:
            if why != self._unread.get(folder, ""):
                if why:
                    log.warning("model_folder_unreadable", folder=str(folder), why=why)
                else:
                    log.info("model_folder_readable", folder=str(folder))
            self._unread[folder] = why

    async def stop(self) -> None:
        """Ends the fetches under way. The next fetch resumes them."""
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
            why = str(error) if isinstance(error, SealringError) else "an internal error"
            pull.problem = "".join(one if one.isprintable() else " " for one in why)[:_MAX_PROBLEM]
            pull.failed = awake_clock()
            failed = [one.name for one in self.pulls.values() if one.problem]
            for name in failed[:-MAX_MODELS]:
                del self.pulls[name]
            log.warning("model_not_fetched", model=pull.name, why=pull.problem)

    async def _fetch(self, pull: Pull, needs: Needs | None, commit: str) -> Path:
        name = pull.name
        async with self._turn:
            found = await asyncio.to_thread(_whole, name, (self._home, *self._folders))
            if found is not None:
                note = await asyncio.to_thread(note_of, found)
                check_commit(name, commit_of(found, note), commit)
                return found
            partial = await asyncio.to_thread(PartialModel, self._home, name)
            await asyncio.to_thread(partial.prepare)
            await asyncio.to_thread(leave_out, self._home)  # it may be larger than a disk of backups

            def progress(done: int, size: int) -> None:
                pull.done, pull.size = done, size

            refused: Unavailable | None = None
            given = False
            if self._asker is not None:
                try:
                    given = await self._asker.fetch(name, partial, progress, needs, commit)
                except Unavailable as error:
                    if error.reason != NOT_GIVEN:
                        raise
                    refused = error
            if not given:
                await self._from_hub(name, partial, pull, needs, commit, refused)
            found = await asyncio.to_thread(partial.publish, keep=given)
        await self.look()
        log.info("model_fetched", model=name, size=pull.size)
        return found

    async def _from_hub(
        self,
        name: str,
        partial: PartialModel,
        pull: Pull,
        needs: Needs | None,
        commit: str,
        refused: Unavailable | None,
    ) -> None:
        """Fetches from the hub what no member has, or what members have and do not give: `refused`."""
        if HUB_ID.fullmatch(name) is None:
            raise refused or not_found(name, "no member has it; the hub's models are named org/name")
        if refused is not None:
            log.warning("members_passed_over", model=name, why=refused.message)
        pull.size = 0
        try:
            await self._parts_from_hub(name, partial, pull, needs, commit)
        except (NotFound, Unavailable) as error:
            if refused is None:
                raise
            raise Unavailable(
                f"{refused.message}; the hub: {error.message}", hint=refused.hint, reason=refused.reason
            ) from None

    async def _parts_from_hub(
        self, name: str, partial: PartialModel, pull: Pull, needs: Needs | None, commit: str
    ) -> None:
        options = ["--commit", commit] if commit else []
        if needs is None:
            await self._ask_hub(name, pull, *options)
            return
        await self._ask_hub(name, pull, "--part", *options)
        ranges = json.dumps(await needs(partial.path)).encode()
        await asyncio.to_thread(write_atomic, partial.path / WANTED, ranges)
        await self._ask_hub(name, pull, "--part", *options)

    async def _ask_hub(self, name: str, pull: Pull, *options: str) -> None:
        """Fetches in a separate process. Raises the error that it reports."""
        ended, problems = asyncio.Event(), []

        def heard(body: bytes) -> None:
            event = engine_pb2.HubEvent.FromString(body)
            if event.HasField("problem"):
                problems.append(from_problem(event.problem))
            if event.size or event.done:
                pull.done, pull.size = event.done, event.size

        child = await Child.spawn(
            "fetch",
            ["-m", FETCH_MODULE, name, "--home", str(self._home), *options],
            on_message=heard,
            on_end=ended.set,
            environment={**_QUIET, **variables(_FOR_HUB)},
        )
        try:
            await _until_ended(child, ended)
        finally:
            status = await self._let_go(child)
        if problems:
            raise problems[0]
        if status:
            raise Unavailable(
                "the process that fetches ended", hint="see the node's log", reason="MODEL_NOT_FETCHED"
            )

    async def _let_go(self, child: Child) -> int:
        """Ends the child and returns its exit status; -1 for a child that cannot end, which is left behind
        (its volume does not answer)."""
        ending = asyncio.get_running_loop().create_task(child.stop())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        done, _ = await asyncio.wait((ending,), timeout=_LET_GO_SECONDS)
        return ending.result() if done else -1


async def _until_ended(child: Child, ended: asyncio.Event) -> None:
    """Raises Unavailable (MODEL_NOT_FETCHED) for a child that is silent for too long."""
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_SECONDS):
                await ended.wait()
        if awake_clock() - child.last_heard > SILENT_SECONDS:
            child.kill()
            raise Unavailable(
                "the process that fetches does not answer",
                hint="check the volume of the node's state folder, and try again: it resumes",
                reason="MODEL_NOT_FETCHED",
            )


def _checked(name: str) -> str:
    if ".." in name or (HUB_ID.fullmatch(name) is None and NAME.fullmatch(name) is None):
        raise InvalidInput(
            f"a model named {name[:80]!r} cannot be fetched",
            hint="name a hub id org/name, or a folder as members call it",
            reason="BAD_MODEL_NAME",
            param="model",
        )
    return name


def _whole(name: str, folders: Sequence[Path]) -> Path | None:
    """The first folder with the whole model; folders with parts of it are skipped."""
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
    size = folder_size(folder)
    return Held(name, size, size, fetched)


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder. Files that disappear meanwhile are skipped."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder. On most Macs "Demo" and "demo" are the same name."""
    with contextlib.suppress(OSError):
        return one == other or os.path.samefile(one, other)
    return False


def _unlink(place: Path) -> bool:
    """Removes a link, and nothing behind it. False where no link is."""
    if place.parent.is_symlink() or not place.is_symlink():
        return False
    place.unlink()
    return True


def _delete(partial: Path, target: Path) -> None:
    """Deletes a model's folders. They are renamed first, so that no half of one is found by its name."""
    shutil.rmtree(partial, ignore_errors=True)
    if target.is_dir():
        partial.parent.mkdir(mode=0o700, exist_ok=True)
        target.rename(partial)
        shutil.rmtree(partial)
