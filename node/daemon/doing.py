"""What a daemon does now, in a small file, for the terminal in which `sealring join` runs it."""

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
    """`coordinator`: it answers. `phases`: of the epochs (`daemon/epoch.py`), by the names of their rings."""

    coordinator: bool
    phases: dict[str, str]


def note_doing(state_dir: Path, doing: Doing) -> None:
    """Leaves word; where the disk takes none, nobody is told."""
    with suppress(OSError):
        write_atomic(state_dir / DOING, json.dumps(asdict(doing)).encode())


def read_doing(state_dir: Path) -> Doing | None:
    """What the daemon was about when it last left word."""
    try:
        return Doing(**json.loads(read_bounded(state_dir / DOING, max_bytes=_MAX_BYTES)))
    except (OSError, ValueError, TypeError, SealringError):
        return None
