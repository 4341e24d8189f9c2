"""A machine saves power on battery and in macOS's Low Power Mode."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from sealring.mesh.system import power as module
from sealring.mesh.system.power import Power, low_power_mode, on_battery, power


@pytest.mark.parametrize(
    ("states", "expected"), [([], False), (["Full"], False), (["Unknown", "Discharging"], True)]
)
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac asks IOKit")
def test_a_battery_that_runs_down_is_seen(tmp_path: Path, states: list[str], expected: bool) -> None:
    for number, state in enumerate(states):
        (tmp_path / f"BAT{number}").mkdir()
        (tmp_path / f"BAT{number}" / "status").write_text(f"{state}\n")
    assert on_battery(tmp_path) == expected


@pytest.mark.parametrize("battery", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_it_is_asked_once_a_minute(monkeypatch: pytest.MonkeyPatch, battery: bool, low: bool) -> None:
    monkeypatch.setattr(module, "on_battery", lambda: battery)
    monkeypatch.setattr(module, "low_power_mode", lambda: low)
    now = 1e9 + 600 * (battery + 2 * low)
    now -= now % 60
    found = power(lambda: now)
    assert (found, found.saved) == (Power(battery, low), battery or low)
    monkeypatch.setattr(module, "on_battery", lambda: not battery)
    assert power(lambda: now + 59) == found
    assert power(lambda: now + 60) == Power(not battery, low)


class Runtime:
    """The part of the Objective-C runtime that is called: one object answers one message."""

    def __init__(self, answer: int) -> None:
        names = [b"NSProcessInfo", b"processInfo", b"isLowPowerModeEnabled"]
        text = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
        message = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.objc_getClass = self.sel_registerName = text(lambda name: 1 + names.index(name))
        self.objc_msgSend = message(lambda to, what: {(1, 2): 9, (9, 3): answer}[to, what])


@pytest.mark.parametrize("answer", [0, 1])
def test_low_power_mode_is_asked_of_the_process_information(answer: int) -> None:
    assert module.says_low(Runtime(answer)) == bool(answer)


@pytest.mark.skipif(sys.platform != "darwin", reason="only macOS has it")
def test_pmset_says_the_same_of_low_power_mode() -> None:
    told = subprocess.run(["/usr/bin/pmset", "-g"], capture_output=True, text=True, check=True).stdout
    settings = dict(line.split()[:2] for line in told.splitlines() if len(line.split()) > 1)
    assert low_power_mode() == (settings.get("lowpowermode", settings.get("powermode")) == "1")
