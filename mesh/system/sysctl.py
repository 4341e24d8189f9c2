"""Properties of a Mac, read without starting a program."""

from __future__ import annotations

import ctypes


def sysctl(name: str, library: ctypes.CDLL | None = None) -> bytes:
    """The bytes of a value by name (sysctlbyname(3)); b"" where there is no such value, or not macOS.

    Numbers are in the machine's byte order, and a text ends with a zero byte. `library` is the C library.
    """
    read = getattr(library or ctypes.CDLL(None), "sysctlbyname", None)
    if read is None:
        return b""
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    failed = read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]
