"""Everything by which the doctor touches this machine, in one class that tests replace.

Commands are fixed, by absolute path and without a shell, in the C locale, with a time limit and a limit on
what they may print. Whatever goes wrong is an answer, never an exception.
"""

from __future__ import annotations

import errno
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.mesh.system.paths import LAUNCH_DAEMONS, launchd_label
from sealring.mesh.system.processes import signal_group
from sealring.mesh.system.starting import starting

if TYPE_CHECKING:
    from sealring.mesh.trust.attestation import Posture

_SECONDS = 10.0
_MAX_OUTPUT = 1 << 20
_MAX_ENTRIES = 4096
_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
_KEPT = ("HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Printed:
    """What a command printed. `why` is empty where it ended well, else what went wrong."""

    text: str = ""
    why: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder as this account sees it; `models` counts the model folders inside.

    `why` is the name of the errno with which it cannot be read. Its owner may be unknown then, which is -1.
    """

    readable: bool
    owner: int
    writable_by_others: bool
    models: int = 0
    why: str = ""


class System:
    """This machine. Each command runs once, and its answer is used again."""

    platform = sys.platform

    def __init__(self) -> None:
        self._answers: dict[tuple[str, ...], Printed] = {}

    def run(self, *command: str, seconds: float = _SECONDS, errors: bool = False) -> Printed:
        """What a command prints on standard output; with `errors` what it says on standard error too."""
        if command not in self._answers:
            self._answers[command] = _run(command, seconds, errors)
        return self._answers[command]

    def executable(self) -> str:
        """The image that this process runs, which on macOS is not what `sys.executable` names."""
        import psutil  # type: ignore[import-untyped]

        with suppress(psutil.Error, OSError):
            return str(psutil.Process().exe())
        return os.path.realpath(sys.executable)

    def python(self) -> str:
        """The interpreter by which other modules of this installation are run."""
        return sys.executable

    def file_limit(self) -> int:
        """How many files this process may have open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def memory(self) -> int:
        """Bytes of memory."""
        import psutil

        return int(psutil.virtual_memory().total)

    def user(self) -> int:
        """The account that this process runs as."""
        return os.geteuid()

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def package(self, name: str) -> str:
        """The installed version of a package; nothing where there is none."""
        with suppress(Exception):
            return metadata.version(name)
        return ""

    def wheel_tag(self, name: str) -> str:
        """The first tag of the wheel that a package was installed from; nothing where that is not known."""
        with suppress(Exception):
            for line in (metadata.distribution(name).read_text("WHEEL") or "").splitlines():
                if line.startswith("Tag: "):
                    return line.removeprefix("Tag: ").strip()[:100]
        return ""

    def free_space(self, folder: Path) -> tuple[int, int] | None:
        """Free and all bytes of the volume that holds the folder, or the nearest one above it."""
        for place in (folder, *folder.parents):
            with suppress(OSError):
                found = shutil.disk_usage(place)
                return found.free, found.total
        return None

    def folder(self, path: Path) -> Folder | None:
        """The folder's properties; None if it does not exist."""
        owner, open_to_others, count, why = -1, False, 0, ""
        try:
            found = path.stat()
            owner, open_to_others = found.st_uid, bool(found.st_mode & 0o022)
            with os.scandir(path) as entries:
                inner = sorted(entry.path for entry in islice(entries, _MAX_ENTRIES))
            if not os.access(path, os.X_OK):
                why = "EACCES"
            count = sum(_is_model(Path(one)) for one in inner)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            why = error_name(error)
        return Folder(not why, owner, open_to_others, count, why)

    def owner(self, path: Path) -> str:
        """The name of the account that a file or folder belongs to; a number where it has none."""
        try:
            number = path.stat().st_uid
            return pwd.getpwuid(number).pw_name
        except KeyError:
            return f"#{number}"
        except OSError:
            return "OWNER"

    def has_service(self, component: str) -> bool:
        """Whether launchd knows a component, as `sealring service install` leaves it."""
        return (LAUNCH_DAEMONS / f"{launchd_label(component)}.plist").exists()

    def bind_error(self, host: str, port: int) -> str:
        """The name of the errno with which listening there fails; nothing where it would work."""
        try:
            with socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            ):
                return ""
        except OSError as error:
            return error_name(error)

    def posture(self) -> Posture:
        """What an attestation would say of this machine."""
        from sealring.node.identity.attestor import measure_posture

        return measure_posture()


def error_name(error: OSError) -> str:
    """An error's name as errno has it, on whichever system it happened."""
    return errno.errorcode.get(error.errno or 0, "UNKNOWN")


def _is_model(folder: Path) -> bool:
    with suppress(OSError):
        return (folder / "config.json").is_file()
    return False


def listens_itself(pid: int, port: int) -> bool:
    """Whether a process of this account listens at a TCP port, and not another in its place. Blocks."""
    import psutil

    with suppress(psutil.Error):
        found = psutil.Process(pid).net_connections(kind="tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)
    return False


def _run(command: tuple[str, ...], seconds: float, errors: bool) -> Printed:
    name = os.path.basename(command[0])
    try:
        with starting():
            process = subprocess.Popen(  # noqa: S603 - fixed commands by absolute path
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
                env={**_ENVIRONMENT, **{name: os.environ[name] for name in _KEPT if name in os.environ}},
                cwd="/",
                process_group=0,
            )
    except OSError as error:
        missing = error.errno == errno.ENOENT
        return Printed(why=f"{name} is not on this machine" if missing else f"{name}: {error.strerror}")
    late = threading.Event()

    def stop() -> None:
        late.set()
        signal_group(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        with process:
            output = process.stdout.read(_MAX_OUTPUT + 1) if process.stdout else b""
            if len(output) > _MAX_OUTPUT:
                signal_group(process.pid, signal.SIGKILL)
    finally:
        timer.cancel()
        timer.join()
    text = output[:_MAX_OUTPUT].decode("utf-8", errors="replace")
    if late.is_set():
        return Printed(text, f"{name} did not answer in {seconds:g} s")
    if len(output) > _MAX_OUTPUT:
        return Printed(text, f"{name} printed too much")
    return Printed(text, "" if process.returncode == 0 else f"{name} ended with status {process.returncode}")
