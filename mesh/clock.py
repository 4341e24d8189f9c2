"""The clock as a value: whatever depends on the time takes one of these, so that tests can turn it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns seconds: since 1970 for a wall clock, from anywhere for a monotonic one."""

SKEW_SECONDS = 60
"""How far two machines' wall clocks may stand apart."""

wall_clock: Clock = time.time
monotonic_clock: Clock = time.monotonic
