"""The compute device: its limits, and the figures of the memory in use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

import mlx.core as mx

from sealring.mesh.system.sysctl import sysctl

CACHE_LIMIT = 256 << 20
"""Bytes of freed buffers that MLX keeps; enough for the temporaries of a decode step."""

CACHE_PART = 64
"""Part of a GPU's memory that MLX keeps if that is more: a lane's old caches, for the lane's next change.
Giving such buffers back and asking for new ones takes as long as copying the caches, and Metal also has to
wire the pages."""

_IDLE_SECONDS, _IDLE_SECONDS_GPU = 5.0, 60.0
"""An engine without work for this long gives back the memory that it keeps for the next step. A GPU keeps it
between two turns of a chat: on Metal each new buffer is zeroed, page by page, and made resident. `overhead`
counts it, whether it is in use or not. A CPU's memory is also that of other programs."""

_READ, _READ_GPU = 8 << 20, 256 << 20
"""Bytes of parameters that are read at once. Where experts are stacked or weights converted, what is read is
there beside what is made of it. A GPU's engine has `overhead` for that, and with fewer waits the disk goes on
reading."""

METAL_EDGES = (6, 10, 12, 13, 15, 18, 25, 33)

CHUNK, CHUNK_IN_TURN = 2048, 256
"""Tokens of a prompt's longest chunk on a GPU, and where rows are computed in turn."""

_WIRED_SPARE = 9
"""Weights and KV caches are wired with a ninth of their size more, for activations. Plans leave a tenth of a
node's memory alone, which is a ninth of the rest. Each ring wires its share of that tenth, and all engines of
a node together wire no more than one engine alone might."""


class Accelerator:
    """What depends on the kind of device. As it stands it is a CPU or a Mac's GPU, which shares the CPU's
    memory; another kind registers its own (`node.engine.nvidia`)."""

    lengths: tuple[int, ...] = ()
    """Tokens of the chunks that warm a stage up, each of a prompt of its own."""

    def computed_as(self, tokens: int) -> int:
        """Tokens that a chunk is padded to: more than `tokens` where a new length costs more than tokens
        do."""
        return tokens

    shares_memory = True
    """Whether any thread of the CPU can read the device's arrays."""

    def transfer(self) -> Any:
        """A `transfer.Transfer` for an epoch, by memory that both can read; None where they share all of it.
        This file knows nothing of what a transfer carries."""
        return None


_accelerator = Accelerator()


def accelerator() -> Accelerator:
    """The accelerator of this process."""
    return _accelerator


def register(accelerator: Accelerator) -> None:
    """Goes by `accelerator` from now on."""
    global _accelerator
    _accelerator = accelerator


def prepare() -> None:
    """Keeps MLX's cache of freed buffers small. Called before any computation."""
    mx.set_cache_limit(cache_limit())


def compute_on_cpu() -> None:
    """Makes the CPU the default device of the process. Called before it has another thread."""
    mx.set_default_device(mx.cpu)


def cache_limit() -> int:
    """Bytes that MLX may keep of freed buffers on this device."""
    return max(CACHE_LIMIT, memory_limit() // CACHE_PART)


def overhead() -> int:
    """Bytes that each engine takes beside weights and KV caches. An estimate.

    It counts the freed buffers that MLX keeps, and the same again for buffers in use. A node's first engine
    has the tenth of its memory that plans leave alone.
    """
    return 2 * cache_limit()


def idle_seconds() -> float:
    """Seconds without work after which the engine calls `give_back`."""
    return _IDLE_SECONDS_GPU if memory_limit() else _IDLE_SECONDS


def read_bytes() -> int:
    """Bytes of parameters to read before the next wait for the disk; they are in memory twice at most."""
    return _READ_GPU if memory_limit() else _READ


def wire(planned: int) -> None:
    """On a Mac, wires the `planned` bytes of weights and KV caches, and some for activations.

    Wired memory is lost to all other programs. Macs of 16 GB have frozen with all of the recommended working
    set wired.
    """
    most = mx.device_info().get("max_recommended_working_set_size")
    if most:
        mx.set_wired_limit(min(int(most), planned + planned // _WIRED_SPARE + cache_limit()))


def compute_in_batches() -> None:
    """On Linux, lets the calling thread and those that it starts interrupt no other thread when they wake.

    A thread that hands MLX a graph wakes MLX's own thread once for every operation. On one core, each would
    interrupt the other some 150 times a decode step. With SCHED_BATCH one works until it waits or its time is
    up. The work of daemon and carrier takes moments and comes first.
    """
    if sys.platform == "linux" and hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def give_back() -> None:
    """Returns MLX's freed buffers and the free part of the heap to the system."""
    mx.clear_cache()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # the GNU C library's
        library.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS; None and 0: all zones, all that is free
        library.malloc_zone_pressure_relief(ctypes.c_void_p(), ctypes.c_size_t(0))


def memory_limit() -> int:
    """Bytes that the device can hold: the recommended working set or the GPU's memory; 0 without a GPU."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory"):
        if info.get(name):
            return int(info[name])
    return 0


def usable_memory() -> int:
    """Bytes of the device for weights, caches and activations, less MLX's freed buffers; 0 without a GPU."""
    limit = memory_limit()
    return max(0, limit - cache_limit()) if limit else 0


def rows_in_turn() -> bool:
    """Whether a step takes about as long as its rows would one after another.

    MLX's build for CPUs multiplies a matrix by one vector after another; a GPU reads it once for all.
    """
    return bool(mx.default_device() == mx.cpu)


def row_edges() -> tuple[int, ...]:
    """Rows of a decode step at which the device changes its kernels, and a step's cost jumps.

    Metal multiplies a quantized matrix by few vectors with one kernel and by more in tiles of 32. Which
    number is few depends on the chip and on the matrix (MLX's `quantized.cpp`). It is 6, 10 and 14 on M1 and
    M2, 13 and 15 on M3 and M4, 13, 25 and 33 on M5, and 12, 18 and 32 on Ultras. A tile costs as much for one
    row as for all.
    """
    return METAL_EDGES if metal() else ()


def metal() -> bool:
    """Whether the device is a Mac's GPU."""
    return bool(mx.metal.is_available() and mx.default_device() == mx.gpu)


def computes_on() -> str:
    """The kind of the device: "CPU", "CUDA" or "Metal"."""
    return "CPU" if rows_in_turn() else "Metal" if metal() else "CUDA"


def identity() -> bytes:
    """Names the GPU that computes among those of all machines; b"" for a CPU, or without a name.

    Two stages on one GPU take turns, and on one CPU each has a core. A Mac has one GPU, which has no name of
    its own: the machine has one until it is started again.
    """
    if rows_in_turn():
        return b""
    return str(mx.device_info().get("uuid", "")).encode() or sysctl("kern.bootsessionuuid")


def longest_chunk() -> int:
    """Tokens of a prompt's longest chunk: as many as mlx-lm computes at once on a GPU. A CPU gains nothing by
    more than some hundreds (docs/decisions/0046-chunks-by-device-and-table.md)."""
    return CHUNK_IN_TURN if rows_in_turn() else CHUNK


def active_memory() -> int:
    """Bytes of MLX's buffers in use."""
    return int(mx.get_active_memory())
