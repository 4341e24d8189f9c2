"""Takes from a process for good what it needs for its imports and never after them: files, the network, other
programs, other processes.

Linux: a seccomp filter (seccomp(2)) allows the calls in `CALLS` and answers all others with EPERM. macOS: a
sandbox profile (sandbox(7), sandbox_init(3)) denies all but what a computation asks of the kernel. On both
the process gets no new descriptor (RLIMIT_NOFILE) and writes no file (RLIMIT_FSIZE). What it has open, the
pipes to its parent, it keeps.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

# The numbers of arch/x86/entry/syscalls/syscall_64.tbl and of include/uapi/asm-generic/unistd.h (aarch64)
CALLS: dict[str, tuple[int, int]] = {
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "close": (3, 57)},
    **{"fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215)},
    **{"brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233), "futex": (202, 98)},
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139)},
    **{"sigaltstack": (131, 132), "restart_syscall": (219, 128), "setitimer": (38, 103)},
    **{"getpid": (39, 172), "gettid": (186, 178), "getrusage": (98, 165), "sysinfo": (99, 179)},
    **{"sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168)},
    **{"clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "nanosleep": (35, 101)},
    **{"getrandom": (318, 278), "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283)},
    **{"exit": (60, 93), "exit_group": (231, 94)},
}
"""Calls that compute, read and write open files, or end, by name: their numbers on x86-64 and on aarch64."""

HELD_CALLS: dict[str, tuple[int, int]] = {
    **{"clone": (56, 220), "clone3": (435, 435), "tgkill": (234, 131)},
    **{"wait4": (61, 260), "seccomp": (317, 277)},
}
"""Those that only some may make, or that this module makes."""

_CLONE, _CLONE3, _TGKILL, _WAIT4, _SECCOMP = HELD_CALLS.values()
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* (linux/audit.h), in the order of the numbers."""

_NO_NEW_PRIVS = 38
_SET_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # struct seccomp_data
_THREAD = 0x10000
_FORK = 0x1200011
"""Flags of clone(2): the bit of all threads, and those with which the C library forks."""

_PROFILE = "(version 1)(deny default)(allow sysctl-read)(allow signal (target self))"
_MAY_FORK = "(allow process-fork)"


def confine(*, forks: bool = False) -> None:
    """Confines this process, all its threads and its children. With `forks` it may have children.

    Raises OSError where the system refuses, and on systems of which nobody knows how it is done.
    """
    if sys.platform == "darwin":
        _enter_sandbox(forks)
    elif sys.platform == "linux":
        _filter_calls(platform.machine(), forks)
    else:
        raise OSError(errno.ENOSYS, f"nothing is known that confines a process on {sys.platform}")


def _filter_calls(machine: str, forks: bool) -> None:
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls is written for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    lines = _program(machine, forks)
    told = struct.pack("@HP", len(lines) // 8, ctypes.addressof(kept := ctypes.create_string_buffer(lines)))
    _hold_to_limits()
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    number = _SECCOMP[list(_MACHINES).index(machine)]
    refused = libc.syscall(number, _SET_FILTER, _ALL_THREADS, told)
    del kept
    if refused:
        raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_SET_MODE_FILTER)")


def _program(machine: str, forks: bool) -> bytes:
    """The filter in classic BPF (linux/filter.h). A call of another architecture ends the process."""
    which = list(_MACHINES).index(machine)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, _CLONE3[which]),  # its flags are in memory; the C library then calls clone
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    plain = [numbers[which] for numbers in CALLS.values()] + [_WAIT4[which]] * forks
    for number in plain:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    held = [(_TGKILL, _EQUAL, os.getpid()), (_CLONE, _ANY_BIT, _THREAD)] + [(_CLONE, _EQUAL, _FORK)] * forks
    for call, test, wanted in held:
        lines += [
            (_EQUAL, 0, 4, call[which]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (test, 0, 1, wanted),
            (_RETURN, 0, 0, _ALLOW),
            (_LOAD, 0, 0, _NUMBER),
        ]
    lines.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _enter_sandbox(forks: bool) -> None:
    """sandbox_init's flags are 0 for a profile that is given as text."""
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    system.sandbox_init.argtypes = ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p)
    why = ctypes.c_char_p()
    profile = _PROFILE + _MAY_FORK * forks
    if system.sandbox_init(profile.encode(), 0, ctypes.byref(why)) != 0:
        raise OSError(errno.EPERM, f"sandbox_init: {(why.value or b'').decode(errors='replace')[:200]}")
    _hold_to_limits()


def _hold_to_limits() -> None:
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
