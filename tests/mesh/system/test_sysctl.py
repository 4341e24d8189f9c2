from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.system.sysctl import sysctl

_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p, ctypes.c_size_t),
)


def library(values: dict[bytes, bytes]) -> Any:
    """A C library whose sysctlbyname writes as xnu's does."""

    def sysctlbyname(name: bytes, value: int, size: Any, new: None, length: int) -> int:
        if name not in values or len(values[name]) > size[0]:
            return -1
        ctypes.memmove(value, values[name], len(values[name]))
        size[0] = len(values[name])
        return 0

    return SimpleNamespace(sysctlbyname=_FUNCTION(sysctlbyname))


@pytest.mark.parametrize(
    ("name", "expected"), [("hw.n", b"\x0c\0\0\0"), ("text", b"Apple M4 Max\0"), ("not.there", b"")]
)
def test_a_value_is_as_long_as_the_system_says(name: str, expected: bytes) -> None:
    assert sysctl(name, library({b"hw.n": b"\x0c\0\0\0", b"text": b"Apple M4 Max\0"})) == expected


def test_another_c_library_has_no_values() -> None:
    none: Any = SimpleNamespace()
    assert sysctl("hw.n", none) == b""
