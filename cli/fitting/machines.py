"""Macs by their memory and chip: what a GPU may take of it, and how fast it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.sysctl import sysctl

_GIB = 1 << 30
GB_PER_S = {
    **{"m1": 68, "m1 pro": 200, "m1 max": 400, "m1 ultra": 800},
    **{"m2": 100, "m2 pro": 200, "m2 max": 400, "m2 ultra": 800},
    **{"m3": 100, "m3 pro": 150, "m3 max": 400, "m3 ultra": 819},
    **{"m4": 120, "m4 pro": 273, "m4 max": 546},
    **{"m5": 153, "m5 pro": 307, "m5 max": 614},
}
"""Memory bandwidth by Apple's technical specifications. Of chips in two sizes it is the larger one's."""

REACHED = 0.8
"""Part of it that a decode step reaches. By the sources in `bench/macs.toml` that is 0.76 on an M4 Pro, 0.78
on an M5 Max, 0.84 on an M3 Ultra and 0.92 on an M4 Max."""

LAYER_SECONDS = 100e-6
"""What a layer takes besides: 65 to 170 us by the same sources."""

_LIKELY = ((32, "m4"), (36, "m3 pro"), (64, "m4 pro"), (128, "m4 max"), (1 << 20, "m3 ultra"))
"""The chip that a Mac with this much memory, in GB, is taken to have where nobody says."""

_MOST_WIRED = 2 / 3, 3 / 4
"""Part of the memory that macOS lets a GPU wire, up to 32 GB and above (`recommendedMaxWorkingSetSize`)."""

_FREED = 64
"""This part of a GPU's memory is left to MLX's freed buffers (`CACHE_PART` in `node/engine/device.py`)."""

_LEAST_FREED = 256 << 20
_MEMORY = re.compile(r"(\d{1,5})\s*(?:GB|GiB)?\Z", re.IGNORECASE)
_MOST = 64


@dataclass(frozen=True)
class Mac:
    """A machine by its memory and what is `usable` of it, in bytes. `chip` is one of GB_PER_S, or empty."""

    name: str
    memory: int
    usable: int
    chip: str = ""


def mac(memory: int, chip: str | None = None, name: str = "") -> Mac:
    """A Mac with `memory` GB (of 2^30 bytes, as Apple counts them), with the likely chip unless one is named;
    empty for an unknown one."""
    share = _MOST_WIRED[memory > 32]
    wired = int(memory * _GIB * share)
    usable = wired - max(_LEAST_FREED, wired // _FREED)
    return Mac(name or f"{memory} GB", memory * _GIB, usable, likely(memory) if chip is None else chip)


def own_mac() -> Mac:
    """This machine, by the memory that it has and by its chip, if that is a Mac's."""
    import psutil  # type: ignore[import-untyped]

    chip = sysctl("machdep.cpu.brand_string").partition(b"\0")[0].decode(errors="replace")
    memory = max(1, round(psutil.virtual_memory().total / _GIB))
    return mac(memory, chip_of(chip), f"this machine ({memory} GB)")


def mac_of(node: Any) -> Mac:
    """A node of `ListNodes` as a machine, with the likely chip unless it computes on no Mac's GPU."""
    beat = node.heartbeat
    chip = likely(round(beat.memory_total / _GIB)) if beat.computes_on in ("", "Metal") else ""
    return Mac(node.name, beat.memory_total, beat.memory_usable, chip)


def likely(memory: int) -> str:
    """The chip that a Mac with `memory` GB is taken to have."""
    return next(chip for most, chip in _LIKELY if memory <= most)


def parse_memory(text: str, chips: str = "") -> list[Mac]:
    """Macs of "64,36,16" GB with the chips "m4 max,m4,m4", for example. Raises InvalidInput (BAD_MEMORY)."""
    sizes = [_MEMORY.match(part.strip()) for part in text.split(",")]
    named = [chip_of(part) for part in chips.split(",")] if chips else [None] * len(sizes)
    if not 1 <= len(sizes) <= _MOST or not all(size and int(size[1]) for size in sizes):
        raise _bad("--memory is not GB of each machine with commas between", "for example --memory 64,36,16")
    if len(named) != len(sizes) or "" in named:
        raise _bad("--chip does not name a chip for each machine", f"known are: {', '.join(GB_PER_S)}")
    found = [mac(int(size[1]), chip) for size, chip in zip(sizes, named, strict=True) if size]
    named_apart = [
        f"{one.name} #{number}" if len(found) > 1 else one.name for number, one in enumerate(found, 1)
    ]
    return [replace(one, name=name) for one, name in zip(found, named_apart, strict=True)]


def chip_of(text: str) -> str:
    """The chip in the system's words ("Apple M4 Pro") or a user's ("m4pro"); empty if it is not known."""
    plain = re.sub(r"(pro|max|ultra)", r" \1", text.lower().replace("apple", ""))
    found = " ".join(re.sub(r"[-_]", " ", plain).split())
    return found if found in GB_PER_S else ""


def told(macs: Sequence[Mac]) -> str:
    """The chips by which rates are estimated, for people."""
    named = dict.fromkeys(
        f"{round(one.memory / _GIB)} GB {one.chip.title() if one.chip else 'of an unknown chip'}"
        for one in macs
    )
    return ", ".join(named)


def _bad(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, hint=hint, reason="BAD_MEMORY", param="memory")
