"""The compute device: its limits, and the figures of the memory in use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from types import ModuleType

import mlx.core as mx

CACHE_LIMIT = 256 << 20
"""Bytes that MLX keeps of freed buffers; enough for the temporaries of a decode step."""

CACHE_PART = 64
"""Part of a GPU's memory that it keeps if that is more: a lane's old caches, for the next change. To give
buffers of that size back and to ask for new ones takes as long as copying the caches, and Metal has to wire
their pages as well."""

_WIRED_SPARE = 9
"""What is wired above weights and KV caches, for activations: one part of so many of them. Plans leave a
tenth of a node's memory alone, which is a ninth of what they may use; so, this is each ring's share of that
tenth, and all engines of a node together wire no more than one of them alone might."""


def nvidia() -> ModuleType | None:
    """`node.engine.nvidia`, where MLX computes on such a GPU."""
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return None
    from sealring.node.engine import nvidia

    return nvidia


def prepare() -> None:
    """Keeps MLX's cache of freed buffers small. Before any computation."""
    found = nvidia()
    if found is not None:
        found.prepare()
    mx.set_cache_limit(cache_limit())


def compute_on_cpu() -> None:
    """For the whole process. Before it has another thread."""
    mx.set_default_device(mx.cpu)


def cache_limit() -> int:
    """Bytes that MLX may keep of freed buffers on this device."""
    return max(CACHE_LIMIT, memory_limit() // CACHE_PART)


def overhead() -> int:
    """Bytes that each engine takes beside weights and KV caches: the buffers that MLX keeps, and as much to
    compute with, for those are what it keeps. An estimate; a node's first engine has the tenth of its memory
    that plans leave alone.
    """
    return 2 * cache_limit()


def wire(planned: int) -> None:
    """On a Mac, keeps in memory what a plan needs (bytes of weights and KV caches) and some to compute with.

    No more, because what is wired is lost to all other programs: with everything wired that the system
    recommends as the most, Macs of 16 GB have frozen.
    """
    most = mx.device_info().get("max_recommended_working_set_size")
    if most:
        mx.set_wired_limit(min(int(most), planned + planned // _WIRED_SPARE + cache_limit()))


def warm_up_lengths() -> tuple[int, ...]:
    """Tokens of the chunks that warm a stage up, each of a prompt of its own."""
    found = nvidia()
    return () if found is None else found.LENGTHS


def computed_as(tokens: int) -> int:
    """Tokens that so many of a chunk are to be computed as: more, where lengths cost more than tokens."""
    found = nvidia()
    return tokens if found is None else int(found.computed_as(tokens))


def compute_in_batches() -> None:
    """From now on the calling thread, and those that it starts, interrupt no other when they wake (Linux).

    Whoever hands MLX a graph wakes MLX's own thread once for every operation. Where both have one core, each
    would interrupt the other some 150 times a decode step; so, one works until it has to wait or its time is
    up. What a daemon or a carrier does takes moments and comes first.
    """
    if sys.platform == "linux" and hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def give_back() -> None:
    """Returns to the system what is kept for later: MLX's freed buffers, and what is free of the heap."""
    mx.clear_cache()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # the GNU C library's
        library.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(library, "malloc_zone_pressure_relief"):  # a Mac's, for all zones and as much as there is
        library.malloc_zone_pressure_relief(ctypes.c_void_p(), ctypes.c_size_t(0))


def memory_limit() -> int:
    """Bytes that the device can hold: the recommended working set or the GPU's memory; 0 without a GPU."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory"):
        if info.get(name):
            return int(info[name])
    return 0


def usable_memory() -> int:
    """Bytes of the device for weights, caches and activations: what MLX keeps for later is none of them.

    0 without a GPU.
    """
    limit = memory_limit()
    return max(0, limit - cache_limit()) if limit else 0


def rows_in_turn() -> bool:
    """Whether a step takes about as long as its rows would one after the other.

    MLX's build for CPUs multiplies a matrix by one vector after the other; a GPU reads it once for all.
    """
    return bool(mx.default_device() == mx.cpu)


def active_memory() -> int:
    return int(mx.get_active_memory())
