"""The memory that engines may use."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]

USABLE_SHARE = 0.75
"""Share of all memory when the compute device names no limit: macOS lets a GPU wire this much by default."""

_SYSTEM_BYTES = 4 << 30
"""Left to the system when the owner lets the GPU wire more (`iogpu.wired_limit_mb`)."""


class MemoryMeter:
    """Measures this machine against the limits of its owner and of its compute device."""

    def __init__(self, configured: int | None) -> None:
        self._configured = configured
        self._device: int | None = None
        self.total = psutil.virtual_memory().total
        """Bytes of this machine."""
        self.overhead = 0
        """Bytes that each engine beyond the first takes beside weights and KV caches."""

    def set_device_limit(self, limit: int, overhead: int) -> None:
        """Takes the figures that an engine process reported, in bytes; a limit of 0 means none."""
        self._device, self.overhead = limit or None, overhead

    @property
    def usable(self) -> int:
        """Bytes for weights and KV caches of this node, including those that are loaded now."""
        share = int(self.total * USABLE_SHARE)
        most = share if self._device is None else max(share, self.total - _SYSTEM_BYTES)
        limits = [most, self._device, self._configured]
        return min(limit for limit in limits if limit is not None)
