"""The parts of this Mac on which its speed depends, for bug reports and beside measurements."""

from __future__ import annotations

import re

from sealring.doctor import memory, power, versions
from sealring.doctor.system import System

IOREG = "/usr/sbin/ioreg"
_SYSCTLS = {
    "model": "hw.model",
    "chip": versions.CHIP,
    "performance_cores": "hw.perflevel0.physicalcpu",
    "efficiency_cores": "hw.perflevel1.physicalcpu",
    "wired_limit_mb": memory.WIRED_LIMIT,
}
_GPU_CORES = re.compile(r'"gpu-core-count"\s*=\s*([0-9]{1,4})\b')
_SOURCE = re.compile(r"^Now drawing from '([\w -]{1,40})'", re.MULTILINE)


def parse_gpu_cores(text: str) -> str:
    """The number of a GPU's cores, from `ioreg -rc AGXAccelerator -d 1`; empty if ioreg does not print it."""
    found = _GPU_CORES.search(text)
    return found[1] if found else ""


def parse_power_source(text: str) -> str:
    """`AC Power` or `Battery Power`, from `pmset -g batt`; empty where it is not said."""
    found = _SOURCE.search(text)
    return found[1] if found else ""


def machine(system: System) -> dict[str, str]:
    """The Mac's properties by name; empty on other machines."""
    if system.platform != "darwin":
        return {}
    found = {name: system.run(memory.SYSCTL, "-n", key).text.strip()[:100] for name, key in _SYSCTLS.items()}
    found |= {
        "gpu_cores": parse_gpu_cores(system.run(IOREG, "-rc", "AGXAccelerator", "-d", "1").text),
        "memory": str(system.memory()),
        "macos": versions.os_version(system),
        "build": versions.os_build(system),
        "power": parse_power_source(system.run(power.PMSET, "-g", "batt").text),
        "mlx_wheel": system.wheel_tag(versions.METAL),
    }
    return {name: value for name, value in found.items() if value}
