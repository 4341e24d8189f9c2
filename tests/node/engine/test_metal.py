from __future__ import annotations

import os

import pytest

from sealring.node.engine import metal

LIMITS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")


@pytest.mark.parametrize(
    ("chip", "raised"),
    [
        (b"Apple M1\0", True),
        (b"Apple M4 Max\0", True),
        (b"Apple M5 Max\0", False),
        (b"Apple M12\0", False),
        (b"Intel(R) Core(TM) i7\0", False),
        (b"", False),
    ],
)
def test_chips_that_gain_get_longer_buffers(
    monkeypatch: pytest.MonkeyPatch, chip: bytes, raised: bool
) -> None:
    for name in LIMITS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    metal.prepare(lambda name: chip)
    assert [name in os.environ for name in LIMITS] == [raised, raised]


def test_the_owner_s_own_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LIMITS, ("7", ""), strict=True):
        monkeypatch.setenv(name, value)
    metal.prepare(lambda name: b"Apple M2\0")
    assert [os.environ[name] for name in LIMITS] == ["7", ""]
