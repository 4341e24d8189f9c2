from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx
import pytest

from sealring.coordinator.planning.demand import capacity
from sealring.node.engine import device


def test_mlx_keeps_little_of_what_is_freed() -> None:
    limit = mx.set_cache_limit(1 << 30)
    try:
        device.prepare()
        assert mx.set_cache_limit(0) == device.CACHE_LIMIT
    finally:
        mx.set_cache_limit(limit)


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


class Library:
    """A C library that has one function."""

    def __init__(self, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        setattr(self, name, lambda *arguments: self.calls.append(arguments))


@pytest.mark.parametrize(
    ("name", "calls"), [("malloc_trim", [(0,)]), ("malloc_zone_pressure_relief", [(None, 0)]), ("other", [])]
)
def test_each_system_is_asked_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: list[tuple[Any, ...]]
) -> None:
    library = Library(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    device.give_back()
    assert [tuple(argument.value for argument in one) for one in library.calls] == calls


@pytest.mark.parametrize(("chosen", "in_turn"), [(mx.cpu, True), (mx.gpu, False)])
def test_a_cpu_computes_rows_in_turn(
    monkeypatch: pytest.MonkeyPatch, chosen: mx.DeviceType, in_turn: bool
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(chosen))
    assert device.rows_in_turn() is in_turn


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is asked for on a Mac whose GPU may take 12 GB."""
    asked: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12_000_000_000})
    monkeypatch.setattr(mx, "set_wired_limit", asked.append)
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: limit)
    return asked


def test_a_mac_wires_what_the_plan_needs_and_no_more(wired: list[int]) -> None:
    device.prepare()
    assert wired == [], "nothing before there is a plan"
    device.wire(4_000_000_000)
    device.wire(11_900_000_000)
    assert wired == [4_000_000_000 + 444_444_444 + device.CACHE_LIMIT, 12_000_000_000]


@pytest.mark.parametrize("shares", [[1.0], [0.99, 0.01], [0.5, 0.5], [0.2, 0.3, 0.5], [0.125] * 8])
def test_engines_of_one_mac_wire_no_more_together_than_one_may(wired: list[int], shares: list[float]) -> None:
    room = capacity(device.usable_memory()) - (len(shares) - 1) * device.overhead()
    for share in shares:
        device.wire(int(share * room))
    assert 0.97 * 12_000_000_000 - len(shares) * device.overhead() < sum(wired) <= 12_000_000_000


def test_nothing_is_wired_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "x86_64"})
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: pytest.fail("wired"))
    device.wire(1 << 40)
    assert device.usable_memory() == 0


@pytest.mark.parametrize(
    ("info", "kept", "usable"),
    [
        ({"max_recommended_working_set_size": 64 << 30}, 1 << 30, 63 << 30),
        ({"total_memory": 8 << 30}, 256 << 20, (8 << 30) - (256 << 20)),
        ({"max_recommended_working_set_size": 100 << 20}, 256 << 20, 0),
    ],
)
def test_a_gpu_keeps_a_part_of_its_memory_which_no_plan_may_use(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, int], kept: int, usable: int
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    device.prepare()
    assert (limits, device.usable_memory()) == ([kept], usable)
