"""NVIDIA's GPU on Linux: its driver, and the build of MLX that computes on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sealring.doctor.report import Finding, ok, problem, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.node.computing import CUDA

NVIDIA_SMI = "/usr/bin/nvidia-smi"
_ASKED = ("--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
_GPU = re.compile(
    r"^([^,\n]{1,80}), ([0-9]{1,4}(?:\.[0-9]{1,4}){1,3}), ([0-9]{1,2}\.[0-9])\s*$", re.MULTILINE
)

DRIVERS = {"mlx-cuda-12": (550, 54, 14), "mlx-cuda-13": (580,)}
CAPABILITY = (7, 5)
"""The first driver and compute capability (https://ml-explore.github.io/mlx/build/html/install.html)."""

_START = "import mlx.core as mx; mx.eval(mx.zeros(1)); print(mx.default_device())"
_START_SECONDS = 60.0
_WHY = re.compile(r"^\w*(?:Error|Exception): (.{1,200})", re.MULTILINE)


def parse_gpus(text: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Name, driver and compute capability of each GPU, as nvidia-smi prints them."""
    return [(match[1], _numbers(match[2]), _numbers(match[3])) for match in _GPU.finditer(text)]


def install(build: str, version: str) -> str:
    """The commands that put `build` in the place of the one for CPUs."""
    wanted = f"mlx[{build.removeprefix('mlx-').replace('-', '')}]=={version}"
    return f"pipx runpip sealring uninstall -y mlx-cpu; pipx inject sealring '{wanted}'"


def check(system: System, view: View) -> Iterator[Finding]:
    """Whether MLX computes where the owner means it to; nothing without a GPU and a build for it."""
    gpus = parse_gpus(system.run(NVIDIA_SMI, *_ASKED).text)
    builds = [name for name in CUDA if system.package(name)]
    others = ["mlx-cpu"] if system.package("mlx-cpu") else []
    fitting = [name for name in CUDA if gpus and gpus[0][1] >= DRIVERS[name]]
    wanted = install([*CUDA[:1], *builds, *fitting][-1], system.package("mlx"))
    if gpus and not builds and view.settings.compute_on_cpu:
        yield ok("nvidia.build", f"{gpus[0][0]} is left alone, as compute_on_cpu says")
    elif gpus and not builds:
        yield warning(
            "nvidia.build",
            f"{gpus[0][0]} is not used: MLX is installed in its build for CPUs",
            "a Linux machine gets that one unless it is told otherwise",
            "install the build for the GPU, or set compute_on_cpu = true",
            wanted,
        )
    if builds and [*others, *builds][1:]:
        yield warning(
            "nvidia.build",
            f"{' and '.join([*others, *builds])} are installed, of which the last to be installed computes",
            "each brings libmlx.so",
            "leave one of them",
            wanted,
        )
    for name, driver, capability in gpus:
        yield _gpu(name, driver, capability, (builds or CUDA)[0])
    if builds:
        yield _started(system, view, builds[0])


def _gpu(name: str, driver: tuple[int, ...], capability: tuple[int, ...], build: str) -> Finding:
    said = f"{name} with driver {_dotted(driver)} and compute capability {_dotted(capability)}"
    if driver >= DRIVERS[build] and capability >= CAPABILITY:
        return ok("nvidia.driver", said)
    return problem(
        "nvidia.driver",
        said,
        f"{build} needs driver {_dotted(DRIVERS[build])} and capability {_dotted(CAPABILITY)}, or newer",
        "install a newer driver; for an older GPU set compute_on_cpu = true, with mlx-cpu installed",
        "ubuntu-drivers install",
    )


def _started(system: System, view: View, build: str) -> Finding:
    """In a process of its own: without a GPU that it sees this build does not start, on the CPU neither."""
    tried = system.run(system.python(), "-c", _START, seconds=_START_SECONDS, errors=True)
    if not tried.why:
        on_gpu = "gpu" in tried.text and not view.settings.compute_on_cpu
        return ok("nvidia.starts", f"this node computes on the {'GPU' if on_gpu else 'CPU'}, with {build}")
    said = _WHY.findall(tried.text)
    return problem(
        "nvidia.starts",
        f"{build} does not start: {said[-1] if said else tried.why}",
        "it needs a GPU that it sees, also on a member that computes on the CPU",
        "see that nvidia-smi shows a GPU and CUDA_VISIBLE_DEVICES names it, or install mlx-cpu instead",
        "nvidia-smi; echo $CUDA_VISIBLE_DEVICES",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
