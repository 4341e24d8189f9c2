from __future__ import annotations

import ctypes
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from sealring.cli.fitting.machines import mac
from sealring.coordinator.planning.demand import capacity
from sealring.node.daemon.engines import MemoryMeter
from sealring.node.engine import device


def test_memory_in_use_is_counted() -> None:
    held = mx.zeros((1 << 20,), mx.uint8)
    mx.eval(held)
    assert device.active_memory() >= held.nbytes
    assert device.memory_limit() >= device.usable_memory() >= 0


def test_what_is_kept_for_later_is_given_back() -> None:
    used = mx.zeros((1 << 20,), mx.uint8)
    mx.eval(used)
    held = mx.get_active_memory()
    other = mx.zeros((1 << 20,), mx.uint8)
    mx.eval(other)
    del other
    assert mx.get_cache_memory() >= 1 << 20
    device.give_back()
    assert mx.get_cache_memory() == 0
    assert mx.get_active_memory() == held, "and nothing that is in use"


@pytest.mark.parametrize(
    ("name", "calls"), [("malloc_trim", [(0,)]), ("malloc_zone_pressure_relief", [(None, 0)]), ("other", [])]
)
def test_each_system_is_asked_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: list[tuple[Any, ...]]
) -> None:
    """A C library has one of these functions."""
    seen: list[tuple[Any, ...]] = []
    library = SimpleNamespace(**{name: lambda *given: seen.append(tuple(one.value for one in given))})
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    device.give_back()
    assert seen == calls


class Gpu:
    """A device as MLX describes it, and the limits that are set on it."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"max_recommended_working_set_size": 12_000_000_000}
        self.wired: list[int] = []
        self.kept: list[int] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A Mac's, of which 12 GB may be taken."""
    made = Gpu()
    fakes = {
        "device_info": lambda: made.info,
        "set_wired_limit": made.wired.append,
        "set_cache_limit": made.kept.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(mx, name, fake)
    return made


def test_a_mac_wires_what_the_plan_needs_and_no_more(gpu: Gpu) -> None:
    device.prepare()
    assert gpu.wired == [], "nothing before there is a plan"
    device.wire(4_000_000_000)
    device.wire(11_900_000_000)
    assert gpu.wired == [4_000_000_000 + 444_444_444 + device.CACHE_LIMIT, 12_000_000_000]


def test_a_gpu_keeps_its_memory_longer_and_reads_no_more_at_once_than_is_counted(gpu: Gpu) -> None:
    kept, read = device.idle_seconds(), device.read_bytes()
    assert read <= device.overhead()
    gpu.info = {}
    assert device.idle_seconds() < kept
    assert device.read_bytes() < read


@pytest.mark.parametrize("shares", [[1.0], [0.99, 0.01], [0.5, 0.5], [0.2, 0.3, 0.5], [0.125] * 8])
def test_engines_of_one_mac_wire_no_more_together_than_one_may(gpu: Gpu, shares: list[float]) -> None:
    room = capacity(device.usable_memory()) - (len(shares) - 1) * device.overhead()
    for share in shares:
        device.wire(int(share * room))
    assert 0.97 * 12_000_000_000 - len(shares) * device.overhead() < sum(gpu.wired) <= 12_000_000_000


def test_nothing_is_wired_without_a_gpu(gpu: Gpu) -> None:
    gpu.info = {"architecture": "x86_64"}
    device.wire(1 << 40)
    assert (device.usable_memory(), gpu.wired) == (0, [])


@pytest.mark.parametrize(
    ("info", "kept", "usable"),
    [
        ({"max_recommended_working_set_size": 64 << 30}, 1 << 30, 63 << 30),
        ({"total_memory": 8 << 30}, 256 << 20, (8 << 30) - (256 << 20)),
        ({"max_recommended_working_set_size": 100 << 20}, 256 << 20, 0),
    ],
)
def test_a_gpu_keeps_a_part_of_its_memory_which_no_plan_may_use(
    gpu: Gpu, info: dict[str, int], kept: int, usable: int
) -> None:
    gpu.info = info
    device.prepare()
    assert (gpu.kept, device.usable_memory()) == ([kept], usable)


def test_a_cpu_has_no_name_for_each_stage_has_a_core() -> None:
    if not device.rows_in_turn():
        pytest.skip("a GPU computes here")
    assert device.identity() == b""


@pytest.mark.parametrize("memory", [8, 16, 24, 32, 36, 64, 128, 512])
def test_macs_that_are_described_have_the_memory_that_their_nodes_report(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit that macOS recommends: two thirds up to 32 GB, three quarters above."""
    limit = memory * (1 << 30) * 2 // 3 if memory <= 32 else memory * (1 << 30) * 3 // 4
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("Memory", "total")(memory * (1 << 30)))
    meter = MemoryMeter(None)
    monkeypatch.setattr(device, "memory_limit", lambda: limit)
    meter.set_device(device.usable_memory(), 0, 0)
    assert mac(memory).usable == pytest.approx(meter.usable, abs=2)
