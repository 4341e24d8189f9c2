"""How a machine saves power: on battery, or because its owner has turned on macOS's Low Power Mode."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from sealring.mesh.clock import Clock, monotonic_clock

_SECONDS = 60.0
"""Time for which an answer is kept."""

_SUPPLIES = Path("/sys/class/power_supply")
_IOKIT = "/System/Library/Frameworks/IOKit.framework/IOKit"
_FOUNDATION = "/System/Library/Frameworks/Foundation.framework/Foundation"
_OBJECTIVE_C = "/usr/lib/libobjc.A.dylib"
_UNLIMITED = -2.0
"""`kIOPSTimeRemainingUnlimited` of IOKit's IOPowerSources.h: a power source that does not run down."""


class Power(NamedTuple):
    """`on_battery` is True, too, where that cannot be found out on a Mac."""

    on_battery: bool
    low: bool
    """Low Power Mode, which only macOS has."""

    @property
    def saved(self) -> bool:
        """Whether to leave what nobody waits for, and not to wait awake."""
        return self.on_battery or self.low


def power(clock: Clock = monotonic_clock) -> Power:
    """The machine's power, of a minute at most ago."""
    return _power_in(int(clock() / _SECONDS))


@lru_cache(maxsize=1)
def _power_in(interval: int) -> Power:
    """As it is now, asked once in each interval."""
    return Power(on_battery(), low_power_mode())


def on_battery(supplies: Path = _SUPPLIES) -> bool:
    """Whether the machine runs on battery; also where that cannot be found out on a Mac."""
    if sys.platform == "darwin":
        try:
            remaining = ctypes.CDLL(_IOKIT).IOPSGetTimeRemainingEstimate
        except (OSError, AttributeError):
            return True
        remaining.restype, remaining.argtypes = ctypes.c_double, []
        return bool(remaining() != _UNLIMITED)
    else:
        with contextlib.suppress(OSError):
            return any(file.read_text().strip() == "Discharging" for file in supplies.glob("*/status"))
        return False


def low_power_mode() -> bool:
    """`NSProcessInfo.lowPowerModeEnabled` (macOS 12), which is what `pmset -g` calls `lowpowermode`."""
    if sys.platform == "darwin":
        try:
            ctypes.CDLL(_FOUNDATION)  # which has the class
            return says_low(ctypes.CDLL(_OBJECTIVE_C))
        except (OSError, AttributeError):
            return False
    else:
        return False


def says_low(runtime: Any) -> bool:
    """The answer of an Objective-C runtime. objc_msgSend is called as the method is that it ends in."""
    address = ctypes.cast(runtime.objc_msgSend, ctypes.c_void_p).value
    assert address is not None
    pointers = (ctypes.c_void_p, ctypes.c_void_p)
    of_object = ctypes.CFUNCTYPE(ctypes.c_void_p, *pointers)(address)
    of_flag = ctypes.CFUNCTYPE(ctypes.c_bool, *pointers)(address)
    for named in (runtime.objc_getClass, runtime.sel_registerName):
        named.restype, named.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    process = of_object(runtime.objc_getClass(b"NSProcessInfo"), runtime.sel_registerName(b"processInfo"))
    return bool(of_flag(process, runtime.sel_registerName(b"isLowPowerModeEnabled")))
