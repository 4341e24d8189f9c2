"""How much memory the engine may use, and how busy the machine is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

USABLE_SHARE = 0.75
"""Of all memory, where the compute device names no lower limit: what macOS lets a GPU wire by default."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes, and the one-minute load average over the number of cores."""

    total: int
    usable: int
    load: float


class MemoryMeter:
    """Measures this machine against the limits of its owner and of its compute device."""

    def __init__(self, configured: int | None) -> None:
        self._configured = configured
        self._device: int | None = None
        self._total = psutil.virtual_memory().total

    def set_device_limit(self, limit: int) -> None:
        """Takes the limit that an engine process reported; 0 means that it knows none."""
        self._device = limit or None

    @property
    def usable(self) -> int:
        """Bytes for weights and KV caches of this node, what is loaded now included."""
        limits = [int(self._total * USABLE_SHARE), self._device, self._configured]
        return min(limit for limit in limits if limit is not None)

    def measure(self) -> MemoryReport:
        """The figures of a heartbeat."""
        return MemoryReport(self._total, self.usable, os.getloadavg()[0] / (os.cpu_count() or 1))
