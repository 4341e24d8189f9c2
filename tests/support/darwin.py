"""What macOS does otherwise than Linux, imposed on Python processes on Linux.

`python tests/support/darwin.py FOLDER` makes a virtual environment over the one that runs it. Every process
of its interpreter, and so all that tests and daemons start by `sys.executable`, has these conditions:

* children are started by fork() and not by vfork(), so that handlers of fork() run;
* gRPC polls, and has no epoll; it cannot be imported with handlers of fork();
* socket pairs hold at most 8 KiB and get no more;
* `killpg` of a group of zombies fails with EPERM;
* there is no /proc, but for psutil, which asks the system on macOS, and for tests;
* nothing that only Linux has: memfd, pidfd, the scheduler's calls, eventfd, splice, TCP_INFO;
* a port that is bound and on which nobody listens drops connections, which Linux resets;
* TCP_CONNECTION_INFO gives the bytes that came on a connection, in XNU's layout;
* F_FULLFSYNC exists, and a disk takes 20 ms for it;
* no process can be held to an address space (RLIMIT_AS);
* what is in a folder called Documents, Desktop or Downloads is not to be read, whatever its mode (TCC);
* MLX keeps all buffers that are freed, unless a process sets a limit;
* a socket with SO_REUSEADDR is bound to 127.0.0.1:PORT beside one that listens on *:PORT;
* the machine can sleep (`sleep`): the monotonic clock stands still meanwhile, the others go on.

With `--pose` each process takes itself for one on macOS as well (`sys.platform`), and goes through the
branches that are for a Mac. Apple's programs and libraries are not there.

Start it with a soft limit of 256 open files (`ulimit -S -n 256`), as a terminal on macOS does. What macOS
does to programs that call the system by themselves, as MLX and gRPC do, cannot be imposed here.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import inspect
import mmap
import os
import resource
import signal
import site
import socket
import struct
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

PAIR_BYTES = 8192
ONLY_LINUX = {
    os: (
        *("memfd_create", "pidfd_open", "eventfd", "eventfd_read", "eventfd_write", "splice"),
        *(
            "sched_getaffinity",
            "sched_setaffinity",
            "sched_getscheduler",
            "sched_setscheduler",
            "sched_getparam",
        ),
        *("sched_setparam", "sched_param", "sched_rr_get_interval", "SCHED_BATCH", "SCHED_IDLE"),
        *("copy_file_range", "posix_fadvise", "posix_fallocate", "getrandom", "getresuid", "O_TMPFILE"),
    ),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    socket: ("TCP_INFO", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED"),
}
_TESTS = str(Path(__file__).resolve().parents[1]) + os.sep
_PRODUCT = str(Path(__file__).resolve().parents[2]) + os.sep
_ALLOWED = ("/proc/self/coredump_filter",)
"""Files that secure a Linux process, which stay readable although the system poses as Darwin."""

FULL_SYNC, FULL_SYNC_SECONDS = 51, 0.02
METAL_CACHE_BYTES = 100 << 30
_PRIVATE = frozenset(("Documents", "Desktop", "Downloads"))
_SLEPT = struct.Struct("=d")
_GOES_ON = tuple(
    getattr(time, f"CLOCK_{name}")
    for name in ("MONOTONIC", "MONOTONIC_RAW", "BOOTTIME", "REALTIME")
    if hasattr(time, f"CLOCK_{name}")
)
"""Linux's clocks that stand for those of macOS that count the time in which the machine sleeps."""

_LISTENING = "0A"
_CONNECTION_INFO = 0x106
_LINUX_BYTES_RECEIVED = struct.Struct("=128xQ")
_DARWIN_INFO = struct.Struct("=88xQ16x")

_real_connect, _real_connect_ex = socket.socket.connect, socket.socket.connect_ex
_real_bind, _real_killpg, _real_pair = socket.socket.bind, os.killpg, socket.socketpair
_real_getsockopt, _real_setsockopt = socket.socket.getsockopt, socket.socket.setsockopt
_real_fcntl, _real_setrlimit = fcntl.fcntl, resource.setrlimit
_real_getrusage = resource.getrusage
_real_time, _real_time_ns, _real_gettime = time.time, time.time_ns, time.clock_gettime
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_tarpit: list[socket.socket] = []


def make(folder: Path, *, pose: bool = False) -> Path:
    """Makes the environment in `folder`, anew if it is there; its interpreter."""
    import venv  # which imports subprocess, before it could be seen to

    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(folder)
    (folder / "bound").mkdir()
    (folder / "slept").write_bytes(_SLEPT.pack(0.0))
    (inside,) = folder.glob("lib/python3*/site-packages")
    own = str(Path(__file__).resolve().parent)
    lines = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    imposing = (
        f"import sys; sys.path.insert(0, {own!r}); import darwin; sys.path.remove({own!r}); "
        f"darwin.impose(pose={pose})"
    )
    (inside / "darwin.pth").write_text("\n".join([*lines, imposing]) + "\n")
    python, script = folder / "bin" / "python", folder / "bin" / "sealring"
    installed = Path(sys.executable).with_name("sealring")
    if installed.exists():
        script.write_text(f"#!{python}\n" + installed.read_text().partition("\n")[2])
        script.chmod(0o755)
    return python


def impose(*, pose: bool = False) -> None:
    """Puts this process under the conditions, for good."""
    for module, names in ONLY_LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.killpg = _killpg
    fcntl.F_FULLFSYNC = FULL_SYNC
    fcntl.fcntl = _fcntl
    resource.setrlimit = _setrlimit
    socket.socketpair = _pair
    time.time, time.time_ns, time.clock_gettime = _time, _time_ns, _gettime
    os.environ["GRPC_POLL_STRATEGY"] = "poll"
    sys.meta_path.insert(0, _AtImport())  # type: ignore[arg-type]
    for name, work in (
        ("bind", _bind),
        ("connect", _connect),
        ("connect_ex", _connect_ex),
        ("getsockopt", _getsockopt),
        ("setsockopt", _setsockopt),
    ):
        setattr(socket.socket, name, work)
    sys.addaudithook(_audit)
    for name in ("stat", "lstat", "readlink", "access"):
        setattr(os, name, _without_proc(getattr(os, name)))
    _make_tarpit()  # in each process from its start, so that no count of its ports changes later
    if pose:
        _pose()


def _pose() -> None:
    sys.platform = "darwin"
    resource.getrusage = _getrusage


# /proc


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and arguments:
        _check_path(arguments[0])


def _without_proc(real: Any) -> Any:
    def checked(path: Any, *arguments: Any, **options: Any) -> Any:
        _check_path(path)
        return real(path, *arguments, **options)

    return checked


def _check_path(path: Any) -> None:
    """Raises FileNotFoundError for what the product, or a library other than psutil, looks for in /proc, and
    PermissionError for what is private."""
    if isinstance(path, int) or path is None:
        return
    name = os.fsdecode(path)
    if not _PRIVATE.isdisjoint(name.split(os.sep)):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
    if not (name == "/proc" or name.startswith("/proc/")) or name in _ALLOWED:
        return
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}psutil{os.sep}" in file or (file.startswith(_TESTS) and file != __file__):
            return
        if file == __file__ and frame.f_code.co_name in ("_zombies", "_listens", "_held"):
            return
        if file.startswith(_PRODUCT) and file != __file__ and f"{os.sep}site-packages{os.sep}" not in file:
            break
        frame = frame.f_back
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


# Files, limits, MLX's memory


def _fcntl(descriptor: Any, command: int, argument: Any = 0) -> Any:
    if command != FULL_SYNC:
        return _real_fcntl(descriptor, command, argument)
    time.sleep(FULL_SYNC_SECONDS)
    os.fsync(descriptor)
    return 0


def _setrlimit(which: int, limits: tuple[int, int]) -> None:
    if which == resource.RLIMIT_AS and limits[0] != resource.RLIM_INFINITY:
        raise ValueError("current limit exceeds maximum limit")  # which is how Python words EINVAL
    _real_setrlimit(which, limits)


class _AtImport:
    """Does `_AFTER` to a module when it has been imported. Imports those of `_BUILT_FOR_LINUX` as on Linux.

    (importlib.abc would import tempfile, which looks for what only Linux has before that is away.)
    """

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name in self._loaders or name not in (*_AFTER, *_BUILT_FOR_LINUX):
            return None
        self._loaders[name] = None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        loader, platform = self._loaders[module.__name__], sys.platform
        module.__spec__.loader = module.__loader__ = loader
        if module.__name__ in _BUILT_FOR_LINUX:
            sys.platform = "linux"
        try:
            loader.exec_module(module)
        finally:
            sys.platform = platform
        _AFTER.get(module.__name__, lambda _: None)(module)


def _fork(subprocess: Any) -> None:
    subprocess._USE_VFORK = False  # noqa: SLF001 - CPython's own switch


def _keep_freed_buffers(core: Any) -> None:
    core.set_cache_limit(METAL_CACHE_BYTES)


def _know_its_build(sysconfig: Any) -> None:
    name = f"_sysconfigdata_{sys.abiflags}_linux_{getattr(sys.implementation, '_multiarch', '')}"
    sysconfig._get_sysconfigdata_name = lambda: name  # noqa: SLF001 - else it names the posed platform's


def _without_fork_handlers(grpc: Any) -> None:
    if os.environ.get("GRPC_ENABLE_FORK_SUPPORT") != "0":
        raise ImportError("gRPC was imported with handlers of fork(), before the package sealring")


def _confine_as_here(confining: Any) -> None:
    confining._enter_sandbox = lambda forks: confining._filter_calls(confining.platform.machine(), forks)  # noqa: SLF001


def _count_as_here(helper: Any) -> None:
    helper._footprint = helper._resident  # noqa: SLF001 - macOS counts by a call that Linux lacks


_AFTER: dict[str, Any] = {
    "subprocess": _fork,
    "mlx.core": _keep_freed_buffers,
    "grpc": _without_fork_handlers,
    "sysconfig": _know_its_build,
    "sealring.node.engine.confining": _confine_as_here,
    "sealring.node.engine.helper": _count_as_here,
}
_BUILT_FOR_LINUX = ("psutil", "urllib.request")
"""Modules that import what only a Mac's Python has, or that would look for it in this system."""


def _getrusage(who: int) -> Any:
    """macOS counts resident memory in bytes, Linux in KiB."""
    usage = _real_getrusage(who)
    fields = list(usage)
    fields[2] <<= 10
    return type(usage)(fields)


# Clocks


def sleep(seconds: float, prefix: str = sys.prefix) -> None:
    """The machine of the environment in folder `prefix` sleeps, in all processes; it takes no time."""
    with open(Path(prefix, "slept"), "r+b") as file:
        (before,) = _SLEPT.unpack(file.read(_SLEPT.size))
        file.seek(0)
        file.write(_SLEPT.pack(before + seconds))


_asleep: list[mmap.mmap] = []


def _slept() -> float:
    if not _asleep:
        with open(Path(sys.prefix, "slept"), "rb") as file:
            _asleep.append(mmap.mmap(file.fileno(), _SLEPT.size, access=mmap.ACCESS_READ))
    return float(_SLEPT.unpack_from(_asleep[0])[0])


def _time() -> float:
    return _real_time() + _slept()


def _time_ns() -> int:
    return _real_time_ns() + int(_slept() * 1e9)


def _gettime(clock: int) -> float:
    return _real_gettime(clock) + (_slept() if clock in _GOES_ON else 0.0)


# Signals


def _killpg(group: int, number: int) -> None:
    if _zombies(group):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    _real_killpg(group, number)


def _zombies(group: int) -> bool:
    """Whether a process group has members and all of them have ended."""
    states = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group:
                states.append(fields[0])
    return bool(states) and set(states) <= {"Z", "X"}


# Sockets


def _pair(*arguments: Any, **options: Any) -> tuple[socket.socket, socket.socket]:
    pair = _real_pair(*arguments, **options)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            _real_setsockopt(end, socket.SOL_SOCKET, option, PAIR_BYTES)
    return pair


def _setsockopt(self: socket.socket, level: int, option: int, *value: Any) -> None:
    sizes = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    larger = level == socket.SOL_SOCKET and option in sizes and value[0] > PAIR_BYTES
    if self.family == socket.AF_UNIX and larger:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
    _real_setsockopt(self, level, option, *value)


def _getsockopt(self: socket.socket, level: int, option: int, *size: int) -> Any:
    if (level, option) == (socket.IPPROTO_TCP, _CONNECTION_INFO):
        info = _real_getsockopt(self, level, _TCP_INFO, _LINUX_BYTES_RECEIVED.size)
        return _DARWIN_INFO.pack(*_LINUX_BYTES_RECEIVED.unpack(info))[: size[0]]
    return _real_getsockopt(self, level, option, *size)


def _bind(self: socket.socket, address: Any) -> None:
    try:
        _real_bind(self, address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_beside_all(self, address):
            raise
        _real_bind(self, (address[0], 0))  # Linux has no such thing: it listens, and elsewhere
    if self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM:
        name = f"{self.getsockname()[1]}-{os.getpid()}-{self.fileno()}-{os.fstat(self.fileno()).st_ino}"
        Path(sys.prefix, "bound", name).touch()


def _is_beside_all(self: socket.socket, address: Any) -> bool:
    """Whether BSD lets a socket have an address of a port that another listens on with all (in_pcbbind)."""
    if self.family != socket.AF_INET or address[0] in ("", "0.0.0.0"):
        return False
    reuses = _real_getsockopt(self, socket.SOL_SOCKET, socket.SO_REUSEADDR)
    return bool(reuses) and _listens(address[1], only="00000000")


def _connect(self: socket.socket, address: Any) -> None:
    _real_connect(self, _silent_instead(self, address))


def _connect_ex(self: socket.socket, address: Any) -> int:
    return _real_connect_ex(self, _silent_instead(self, address))


def _silent_instead(self: socket.socket, address: Any) -> Any:
    """An address that never answers, if `address` is bound here and nobody listens on it; else `address`."""
    if self.family != socket.AF_INET or self.type != socket.SOCK_STREAM:
        return address
    port = address[1]
    if not any(_held(entry) for entry in Path(sys.prefix, "bound").glob(f"{port}-*")) or _listens(port):
        return address
    return _tarpit[0].getsockname()


def _make_tarpit() -> None:
    """Fills a backlog: Linux drops connections when one more waits to be accepted than may."""
    full = socket.socket()
    _real_bind(full, ("127.0.0.1", 0))
    full.listen(0)
    waiting = socket.socket()
    _real_connect(waiting, full.getsockname())
    _tarpit.extend((full, waiting))


def _held(entry: Path) -> bool:
    """Whether the process that bound the port still has the socket."""
    _, pid, descriptor, inode = entry.name.split("-")
    try:
        if os.readlink(f"/proc/{pid}/fd/{descriptor}") == f"socket:[{inode}]":
            return True
    except OSError:
        pass
    entry.unlink(missing_ok=True)
    return False


def _listens(port: int, only: str = "") -> bool:
    """Whether somebody listens on a port; of which address, in the form of /proc/net/tcp, may be asked."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                (host, _, number), state = line.split()[1].rpartition(":"), line.split()[3]
                if state == _LISTENING and int(number, 16) == port and only in ("", host):
                    return True
    return False


if __name__ == "__main__":
    print(make(Path(sys.argv[1]).absolute(), pose="--pose" in sys.argv))  # noqa: T201
