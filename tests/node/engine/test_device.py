from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine import device


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Says whether compilation was switched off, without doing it."""
    off: list[bool] = []
    limit = mx.set_cache_limit(1 << 30)
    monkeypatch.setattr(mx, "disable_compile", lambda: off.append(True))
    yield off
    mx.set_cache_limit(limit)


@pytest.mark.parametrize(
    ("mode", "compiles"), [(0o700, True), (0o777, False), (0o1777, False), (0o750, False)]
)
def test_kernels_are_compiled_only_into_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switched: list[bool], mode: int, compiles: bool
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    device.prepare()
    assert switched == ([] if compiles else [True])
    assert mx.set_cache_limit(0) == device.CACHE_LIMIT


def test_memory_is_told() -> None:
    held = mx.zeros((1 << 20,), mx.uint8)
    mx.eval(held)
    assert device.peak_memory() >= device.active_memory() >= held.nbytes
    assert device.memory_limit() >= 0
