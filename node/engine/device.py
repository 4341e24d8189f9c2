"""The compute device: its limits, and the figures of the memory in use."""

from __future__ import annotations

import os
import stat
import tempfile

import mlx.core as mx

CACHE_LIMIT = 256 << 20
"""Bytes that MLX keeps of freed buffers; enough for the temporaries of a decode step."""


GRAPH_OPERATIONS = "20"
"""Operations that MLX hands to an NVIDIA GPU at once. Its own 100 are six layers of a decode step, for which
the GPU waits at the beginning and we at the end."""


def prepare() -> None:
    """Keeps MLX's cache of freed buffers small and, on a Mac, the weights wired. Before any computation.

    On a CPU MLX compiles fused kernels with the system's compiler into the folder for temporary files and
    loads what it finds there, so it may do that only where nobody else can put anything.
    """
    if mx.cuda.is_available():
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", GRAPH_OPERATIONS)
    if mx.default_device() == mx.cpu and not _is_private(tempfile.gettempdir()):
        mx.disable_compile()
    mx.set_cache_limit(CACHE_LIMIT)
    wired = mx.device_info().get("max_recommended_working_set_size")
    if wired:
        mx.set_wired_limit(int(wired))


def _is_private(folder: str) -> bool:
    status = os.stat(folder)
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def memory_limit() -> int:
    """Bytes that the device can hold: the recommended working set or the GPU's memory; 0 without a GPU."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory"):
        if info.get(name):
            return int(info[name])
    return 0


def active_memory() -> int:
    return int(mx.get_active_memory())


def peak_memory() -> int:
    return int(mx.get_peak_memory())
