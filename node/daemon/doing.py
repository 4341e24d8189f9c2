"""The daemon's current state in a small file, read by the terminal in which `sealring join` runs it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sealring.mesh.errors import SealringError
from sealring.mesh.system.files import read_bounded, write_atomic

DOING = "doing.json"
_MAX_BYTES = 1024


@dataclass(frozen=True)
class Doing:
    """`coordinator` says whether it answers. `phases` are those of epochs, by the names of their rings."""

    coordinator: bool
    phases: dict[str, str]


def note_doing(state_dir: Path, doing: Doing) -> None:
    """Writes the state; a disk that cannot take it is ignored."""
    with suppress(OSError):
        write_atomic(state_dir / DOING, json.dumps(asdict(doing)).encode())


def read_doing(state_dir: Path) -> Doing | None:
    """The state that the daemon wrote last; None without a file that can be read."""
    try:
        return Doing(**json.loads(read_bounded(state_dir / DOING, max_bytes=_MAX_BYTES)))
    except (OSError, ValueError, TypeError, SealringError):
        return None
