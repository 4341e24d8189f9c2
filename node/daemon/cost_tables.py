"""Cost tables of earlier starts: the least time that each step and guess of a stage took, on this machine.

Whatever else the machine does makes some steps slow in the table that a start has timed, and the scheduler
divides rows into lanes and has tokens guessed by it. The least time of several starts is that of the device
alone, so later starts serve alike.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from sealring.mesh.errors import SealringError
from sealring.mesh.rpc.protocol import own_release
from sealring.mesh.system.files import read_bounded, write_atomic
from sealring.mesh.system.sysctl import sysctl
from sealring.node.computing import versions
from sealring.node.daemon.engine_process import StageKey
from sealring.v1 import control_pb2, engine_pb2

log = structlog.get_logger()

_MOST = 64
"""Files, each of one stage; the oldest go first."""

_LONGEST = 64
"""Times of a table at most; a start times fewer. Gateways and the coordinator look at as many."""


class CostTables:
    """One node's tables, in `folder`. It is asked from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, stage: StageKey, device: tuple[str, int], loaded: engine_pb2.StageLoaded) -> None:
        """Gives a stage that was just loaded the least times of all starts, and keeps them.

        `device`: what computes, and the bytes that it can hold. A table that cannot be read is no table, and
        a disk that takes none is left alone.
        """
        file = self._folder / _name(stage, device)
        kept = _read(file)
        times = least([*kept.times, *loaded.times])
        del loaded.times[:]
        loaded.times.extend(times)
        earlier = {one.source: one for one in kept.sources}
        for one in loaded.sources:
            before = earlier.get(one.source, one)
            one.microseconds = min(one.microseconds, before.microseconds or one.microseconds)
            together = before.rows_microseconds or one.rows_microseconds
            one.rows_microseconds = min(one.rows_microseconds, together)
        try:
            found = engine_pb2.StageLoaded(times=times, sources=loaded.sources)
            write_atomic(file, found.SerializeToString())
            for old in sorted(self._folder.iterdir(), key=lambda one: one.stat().st_mtime_ns)[:-_MOST]:
                old.unlink()
        except OSError as error:
            log.warning("cost_table_not_kept", why=error.strerror)


def _read(file: Path) -> engine_pb2.StageLoaded:
    try:
        found = engine_pb2.StageLoaded.FromString(read_bounded(file))
    except (OSError, SealringError, DecodeError):
        return engine_pb2.StageLoaded()
    # Nothing is less than 0: a step that took no time would be in all later tables, and count in none.
    possible = len(found.times) <= _LONGEST and all(one.microseconds for one in found.times)
    return found if possible else engine_pb2.StageLoaded()


def least(times: Iterable[control_pb2.StepTime]) -> list[control_pb2.StepTime]:
    """The least time of each size; of steps behind a context, those behind the longest."""
    found: dict[tuple[int, int, int], control_pb2.StepTime] = {}
    for one in times:
        size = one.context, one.tokens, one.rows
        if size not in found or one.microseconds < found[size].microseconds:
            found[size] = one
    longest = max((context for context, _, _ in found), default=0)
    return [one for (context, _, _), one in sorted(found.items()) if context in (0, longest)]


def _name(stage: StageKey, device: tuple[str, int]) -> str:
    """The name of a stage's file: of what it is, of what computes it, and of the software that does."""
    chip = sysctl("machdep.cpu.brand_string") or (platform.machine(), os.cpu_count())
    computed_by = platform.version(), chip, device, own_release().software, versions()
    return hashlib.sha256(repr((stage, computed_by)).encode()).hexdigest()
