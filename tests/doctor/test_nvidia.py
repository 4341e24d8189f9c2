"""What the doctor says of a Linux machine with an NVIDIA GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from doctortest import FakeSystem, by_id

from sealring.doctor import local, nvidia
from sealring.doctor.report import Severity
from sealring.doctor.system import Printed
from sealring.doctor.view import View
from sealring.node.computing import CUDA

H200 = "NVIDIA H200, 580.95.05, 9.0\n"
OLD_DRIVER = "NVIDIA H200, 560.35.03, 9.0\n"
OLD_GPU = "Tesla V100-SXM2-16GB, 580.95.05, 7.0\n"
STARTS, NOT_THERE = "Device(gpu, 0)\n", "RuntimeError: [load_device] No CUDA device is visible.\n"
BOTH = ("mlx-cpu", "mlx-cuda-13")


def machine(gpu: str, builds: tuple[str, ...], start: str | Printed = STARTS) -> FakeSystem:
    packages = dict.fromkeys(("sealring", "mlx", "mlx-lm", *builds), "0.32.4")
    says: Mapping[str, str | Printed] = {"python -c": start} | ({nvidia.NVIDIA_SMI: gpu} if gpu else {})
    return FakeSystem(says, platform="linux", packages=packages)


def on_cpu(view: View) -> View:
    settings = view.settings.model_copy(update={"compute_on_cpu": True})
    return View(settings)


@pytest.mark.parametrize(
    ("system", "found"),
    [
        (machine("", ("mlx-cpu",)), {}),
        (machine(H200, CUDA[1:]), {"driver": "OK", "starts": "OK"}),
        (machine(OLD_DRIVER, CUDA[1:]), {"driver": "PROBLEM", "starts": "OK"}),
        (machine(OLD_DRIVER, CUDA[:1]), {"driver": "OK", "starts": "OK"}),
        (machine(OLD_GPU, CUDA[1:]), {"driver": "PROBLEM", "starts": "OK"}),
        (machine(H200, ("mlx-cpu",)), {"build": "WARNING", "driver": "OK"}),
        (machine(H200, BOTH), {"build": "WARNING", "driver": "OK", "starts": "OK"}),
        (machine("", CUDA[1:], Printed(NOT_THERE, "python ended with status 1")), {"starts": "PROBLEM"}),
    ],
)
def test_each_way_in_which_a_gpu_is_not_used_is_found(
    system: FakeSystem, found: dict[str, str], view: View
) -> None:
    said = {one.id: one.severity.name for one in local.examine(system, view).findings}
    own = {name: severity for name, severity in said.items() if name.startswith("nvidia.")}
    assert own == {f"nvidia.{name}": severity for name, severity in found.items()}


def test_what_is_said_names_the_cause_and_the_command(view: View) -> None:
    unused = by_id(nvidia.check(machine(H200, ("mlx-cpu",)), view))["nvidia.build"]
    assert "NVIDIA H200 is not used" in unused.what
    assert unused.command.endswith("pipx inject sealring 'mlx[cuda13]==0.32.4'")
    older = by_id(nvidia.check(machine(OLD_DRIVER, ("mlx-cpu",)), view))["nvidia.build"]
    assert "mlx[cuda12]" in older.command
    both = by_id(nvidia.check(machine(H200, BOTH), view))["nvidia.build"]
    assert both.what.startswith("mlx-cpu and mlx-cuda-13 are installed")
    blind = machine("", CUDA[1:], Printed(NOT_THERE, "python ended with status 1"))
    assert "No CUDA device is visible" in by_id(nvidia.check(blind, view))["nvidia.starts"].what


def test_a_member_on_the_cpu_is_as_its_owner_means_it(view: View) -> None:
    left = by_id(nvidia.check(machine(H200, ("mlx-cpu",)), on_cpu(view)))["nvidia.build"]
    assert (left.severity, "left alone" in left.what) == (Severity.OK, True)
    with_build = by_id(nvidia.check(machine(H200, CUDA[1:]), on_cpu(view)))["nvidia.starts"]
    assert "computes on the CPU" in with_build.what


def test_the_builds_are_those_that_mlx_names() -> None:
    """By the metadata of the installed package: the extras and the packages that they bring."""
    named = {}
    for line in requires("mlx") or ():
        if (match := re.match(r"(mlx-c[\w-]+)==(\S+);.*extra == [\"'](\w+)[\"']", line)) is not None:
            named[match[3]] = match[1], match[2]
    for build in CUDA:
        extra = re.search(r"mlx\[(\w+)\]", nvidia.install(build, "1"))
        assert extra is not None
        assert named[extra[1]] == (build, version("mlx"))
    assert named["cpu"] == ("mlx-cpu", version("mlx"))
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"mlx=={version('mlx')}\n" in constraints
