"""Fetches a model, or the parts that a stage needs, from members; each part is checked."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from sealring.mesh.clock import awake_clock
from sealring.mesh.errors import ModelError, SealringError, Unavailable
from sealring.mesh.names import is_commit, is_sha256
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.roster.model import Roster, RosterMember
from sealring.mesh.rpc.reach import Reach
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import TlsStore
from sealring.node.models.giving import LEAST_PIECE, MAX_PARTS, SERVICE, decode
from sealring.node.models.kept import Parts, beginnings, headers, parts_of, runs, with_ranges
from sealring.node.models.manifest import Manifest
from sealring.node.models.partial_model import PartialModel
from sealring.v1 import models_pb2, models_pb2_grpc

log = structlog.get_logger()

_DESCRIBE_SECONDS = 3600.0
"""A member that is asked for the first time reads the whole model."""

OTHERS_SECONDS = 5.0
"""Timeout of other members after a member with the whole model has answered. It is enough for members that
need not read their files, which takes minutes."""

_PIECE_SECONDS = 60.0
_BUSY_SECONDS = 2.0
_BUSY = ("MODELS_BUSY", "RATE_LIMITED")
PATIENCE_SECONDS = 300.0
"""Longest wait for members that only say that they are busy. A busy member serves four streams of 1 GiB at a
time: over gigabit Ethernet it has a free slot after 40 s, over Wi-Fi after 200 s."""

_STILL_BUSY = SealringError("those that have it stay busy")
NOT_GIVEN = "MODEL_NOT_GIVEN"
"""Reason of the error for members that give no missing part at all."""

_SHOWN = 4

Progress = Callable[[int, int], None]
"""Called with the bytes that are here, and the bytes wanted: 0 until the headers tell which a stage needs."""

Needs = Callable[[Path], Awaitable[Sequence[tuple[str, int, int]]]]
"""Given a folder with the headers of its weight files: the bytes [first, end) of files that a stage needs."""


@dataclass
class _Giver:
    """A member that has parts of the model."""

    member: RosterMember
    read: Callable[[models_pb2.ReadModelRequest], Any]
    manifest: Manifest
    have: Parts
    commit: str
    hub_files: str

    @property
    def whole(self) -> bool:
        return all(len(here) == file.parts for file, here in zip(self.manifest.files, self.have, strict=True))


class ModelAsker:
    """Asks all members of the roster for their parts, and fetches from them in random order."""

    def __init__(
        self, cluster: str, own_id: str, store: TlsStore, roster: Callable[[], Roster | None]
    ) -> None:
        self._cluster = cluster
        self._own_id = own_id
        self._reach = Reach(store)
        self._roster = roster

    async def fetch(
        self,
        model: str,
        partial: PartialModel,
        progress: Progress,
        needs: Needs | None = None,
        commit: str = "",
    ) -> bool:
        """Fills `partial` with a model, or with the ranges that `needs` returns.

        False if no member has any part, or only parts of another commit than `commit`. Raises ModelError
        (MODEL_VERSIONS_DIFFER) if members have different models of this name. Raises Unavailable: with
        MODEL_NOT_GIVEN if the members gave no missing part, also as all of them stayed busy, with
        MODEL_NOT_FETCHED if they gave some. Raises what `PartialModel` and `needs` raise.
        """
        async with AsyncExitStack() as channels:
            givers = await self._givers(model, commit, channels)
            if not givers:
                return False
            manifest = givers[0].manifest  # all givers have the same one
            known = max(givers, key=lambda one: (bool(one.hub_files), bool(one.commit)))
            claimed = {giver.hub_files for giver in givers if giver.hub_files}
            hub_files = claimed.pop() if len(claimed) == 1 else ""  # of several claims only one can be true
            begin = functools.partial(
                partial.begin,
                commit=known.commit,
                checked=bool(known.commit),
                hub_files=hub_files,
                tell=lambda: progress(partial.done, partial.size),
            )
            if needs is None:
                await asyncio.to_thread(begin, manifest)
                await _fill(model, givers, partial, progress)
                return True
            wanted = beginnings(manifest)
            await asyncio.to_thread(begin, manifest, wanted)
            await _fill(model, givers, partial, lambda done, size: progress(done, 0))
            wanted = headers(manifest, wanted, partial.path)
            await asyncio.to_thread(partial.want, wanted)
            await _fill(model, givers, partial, lambda done, size: progress(done, 0))
            wanted = with_ranges(manifest, wanted, await needs(partial.path))
            await asyncio.to_thread(partial.want, wanted)
            await _fill(model, givers, partial, progress)
            return True

    async def _givers(self, model: str, commit: str, channels: AsyncExitStack) -> list[_Giver]:
        """Members with parts of the model, none of another commit, all with the same manifest.

        Busy members are asked again if no other has it. Raises ModelError (MODEL_VERSIONS_DIFFER),
        Unavailable (MODEL_NOT_GIVEN).
        """
        members, until = self._members(), awake_clock() + PATIENCE_SECONDS
        while True:
            asked = await self._ask_all(members, model, commit, channels)
            givers = [one for one in asked if isinstance(one, _Giver)]
            found = [one for one in givers if _fits(one, commit)]
            if found or True not in asked:
                break
            members = [member for member, one in zip(members, asked, strict=True) if one is True]
            if awake_clock() >= until:
                raise _not_given(model, _STILL_BUSY, gave=False)
            await asyncio.sleep(_BUSY_SECONDS)
        by_digest: dict[str, list[str]] = {}
        for giver in found:
            by_digest.setdefault(giver.manifest.digest.hex()[:8], []).append(giver.member.id[:16])
        if len(by_digest) > 1:
            versions = (
                f"{digest}: {', '.join(sorted(names)[:_SHOWN])}"
                for digest, names in sorted(by_digest.items())
            )
            raise ModelError(
                f"members have different models named {model} ({'; '.join(versions)})",
                hint="remove the wrong one there: sealring model remove",
                reason="MODEL_VERSIONS_DIFFER",
            )
        return found

    async def _ask_all(
        self, members: Sequence[RosterMember], model: str, commit: str, channels: AsyncExitStack
    ) -> list[_Giver | bool]:
        """The answer of each member; False for one that is still reading its files 5 s after another has
        answered with the whole model."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._ask(member, model, channels)) for member in members]
        pending, until = set(tasks), None
        try:
            while pending:
                patience = None if until is None else max(0.0, until - loop.time())
                done, pending = await asyncio.wait(
                    pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                if until is None and any(_has_all(task.result(), commit) for task in done):
                    until = loop.time() + OTHERS_SECONDS
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return [task.result() if task.done() and not task.cancelled() else False for task in tasks]

    def _members(self) -> list[RosterMember]:
        roster = self._roster()
        others = [one for one in roster.members if one.id != self._own_id] if roster is not None else []
        random.shuffle(others)
        return others

    async def _ask(self, member: RosterMember, model: str, channels: AsyncExitStack) -> _Giver | bool:
        """A member's parts of a model; otherwise whether the member is too busy to answer."""
        peer = PeerIdentity(self._cluster, Role.MEMBER, member.id)
        try:
            channel = await self._reach.connect(peer, member.addresses)
            channels.push_async_callback(channel.close)
            connection: Any = channel.get()
            stub = models_pb2_grpc.ModelsStub(connection)
            read = connection.unary_stream(
                f"/{SERVICE}/Read", request_serializer=models_pb2.ReadModelRequest.SerializeToString
            )
            request = models_pb2.DescribeModelRequest(model=model)
            described = await stub.Describe(request, timeout=_DESCRIBE_SECONDS)
            manifest = Manifest.from_message(described)
            commit, hub_files = described.commit, described.hub_files
            if (commit and not is_commit(commit)) or (hub_files and not (commit and is_sha256(hub_files))):
                raise ModelError("the commit of a manifest is malformed", reason="BAD_MANIFEST")
            return _Giver(member, read, manifest, parts_of(described, manifest), commit, hub_files)
        except (grpc.RpcError, SealringError) as raised:
            return _note(member, raised).reason in _BUSY


def _fits(giver: _Giver, commit: str) -> bool:
    """Whether a member's parts are of `commit`, as far as it is known; an empty `commit` fits all."""
    return not commit or giver.commit in ("", commit)


def _has_all(answer: _Giver | bool, commit: str) -> bool:
    return isinstance(answer, _Giver) and answer.whole and _fits(answer, commit)


async def _fill(model: str, givers: Sequence[_Giver], partial: PartialModel, progress: Progress) -> None:
    """Fetches missing parts from one giver after the other. A giver that fails is not asked again, unless it
    is busy, for a limited time, or its connection broke after some parts had arrived.

    Raises Unavailable (MODEL_NOT_GIVEN, MODEL_NOT_FETCHED), and what `PartialModel.add` raises.
    """
    left, error = list(givers), SealringError("they do not have all of it")
    at_first, until = partial.done, awake_clock() + PATIENCE_SECONDS
    progress(partial.done, partial.size)
    while any(partial.missing()):
        later, round_began = [], partial.done
        for giver in left:
            before = partial.done
            try:
                await _copy_missing(giver, partial, progress)
            except (grpc.RpcError, SealringError, TimeoutError) as raised:
                failed = _note(giver.member, raised)
                if failed.reason in ("DISK_FULL", "STATE_UNWRITABLE"):
                    raise failed from None
                if failed.reason in _BUSY or (isinstance(failed, Unavailable) and partial.done > before):
                    later.append(giver)
                else:
                    error = failed
        left = later
        if partial.done > round_began:
            until = awake_clock() + PATIENCE_SECONDS
        elif left and awake_clock() >= until:
            left, error = [], _STILL_BUSY
        if left:
            await asyncio.sleep(_BUSY_SECONDS)
        elif any(partial.missing()):
            raise _not_given(model, error, gave=partial.done > at_first)


async def _copy_missing(giver: _Giver, partial: PartialModel, progress: Progress) -> None:
    for file, (missing, have) in enumerate(zip(partial.missing(), giver.have, strict=True)):
        for run in runs(missing & have):
            for first in range(run.start, run.stop, MAX_PARTS):
                await _copy(giver, file, range(first, run.stop)[:MAX_PARTS], partial, progress)


def _not_given(model: str, error: SealringError, *, gave: bool) -> Unavailable:
    """The error for members that do not give all of a model; `gave` if they gave some parts."""
    return Unavailable(
        f"no member passes all of {model} on: {error.message}",
        hint="try again: parts that have arrived are kept",
        reason="MODEL_NOT_FETCHED" if gave else NOT_GIVEN,
    )


def _note(member: RosterMember, raised: BaseException) -> SealringError:
    error = from_rpc_error(raised) if isinstance(raised, grpc.RpcError) else raised
    if not isinstance(error, SealringError):
        error = Unavailable("it sent nothing for too long", reason="SLOW_PEER")
    if error.reason not in (*_BUSY, "MODEL_NOT_FOUND", "PEER_UNREACHABLE"):
        log.warning("model_not_passed_on", member=member.id, reason=error.reason)
    return error


async def _copy(giver: _Giver, index: int, parts: range, partial: PartialModel, progress: Progress) -> None:
    """Copies the parts of one call. The next part arrives while one is hashed and written."""
    file = giver.manifest.files[index]
    request = models_pb2.ReadModelRequest(
        manifest=giver.manifest.digest, file=index, first=parts.start, parts=len(parts)
    )
    call, came = giver.read(request), partial.done
    adding: asyncio.Task[None] | None = None
    try:
        for part in parts:
            pieces: list[memoryview] = []
            left = file.length(part)
            while left:
                async with asyncio.timeout(_PIECE_SECONDS):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    raise ModelError(f"{file.name} ends too early", reason="MODEL_PART_DAMAGED")
                pieces.append(decode(message))
                # Pieces of one byte would delay the fetch for years, and take all of the memory.
                if not min(LEAST_PIECE, left) <= len(pieces[-1]) <= left:
                    raise ModelError(f"{file.name} comes in other pieces", reason="MODEL_PART_DAMAGED")
                left, came = left - len(pieces[-1]), came + len(pieces[-1])
                progress(came, partial.size)
            if adding is not None:
                await adding
            adding = asyncio.create_task(asyncio.to_thread(partial.add, index, part, pieces))
        if adding is not None:
            await adding
            progress(partial.done, partial.size)
    finally:
        call.cancel()
        if adding is not None and not adding.done():
            await asyncio.wait((adding,))
