"""The compute device: its limits, and the figures of the memory in use."""

from __future__ import annotations

import mlx.core as mx

CACHE_LIMIT = 256 << 20
"""Bytes that MLX keeps of freed buffers; enough for the temporaries of a decode step."""


def prepare() -> None:
    """Keeps MLX's cache of freed buffers small and, on a Mac, the weights wired."""
    mx.set_cache_limit(CACHE_LIMIT)
    wired = mx.device_info().get("max_recommended_working_set_size")
    if wired:
        mx.set_wired_limit(int(wired))


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
