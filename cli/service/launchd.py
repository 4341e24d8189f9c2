"""launchd property lists and newsyslog rules for the components (launchd.plist(5), newsyslog.conf(5))."""

from __future__ import annotations

import plistlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.paths import CLIENT_FOLDER, launchd_label

COMPONENTS = ("coordinator", "node", "gateway", "proxy")
NEWSYSLOG_FOLDER = Path("/etc/newsyslog.d")
LOG_FOLDER = PurePosixPath("/var/log/sealring")
STATE_FOLDER = PurePosixPath("/var/db/sealring")
DRAIN_SECONDS = 30
EXIT_TIME_OUT = DRAIN_SECONDS + 15
_UMASK = 0o077

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}\Z")
_UNSAFE_PATH = re.compile(r"[\s\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Service:
    """One component as a LaunchDaemon. `program` is the absolute path of the `sealring` command."""

    component: str
    program: str = "/usr/local/sealring/bin/sealring"
    user: str = "_sealring"
    config: str | None = None
    state: str = str(STATE_FOLDER)
    logs: str = str(LOG_FOLDER)
    listen: str = "127.0.0.1:8080"
    """The proxy alone has these: host:port for programs, and the SHA-256 of the key that they show."""
    key_sha256: str = ""

    def __post_init__(self) -> None:
        if self.component not in COMPONENTS:
            raise InvalidInput(
                f"there is no component {self.component[:40]!r}",
                hint=f"one of {', '.join(COMPONENTS)}",
                reason="BAD_SERVICE",
            )
        if _NAME.match(self.user) is None:
            raise InvalidInput(f"{self.user[:40]!r} is no user name", reason="BAD_SERVICE", param="user")
        for path in (self.program, self.config, self.state, self.logs):
            if path is not None and (not path.startswith("/") or _UNSAFE_PATH.search(path)):
                raise InvalidInput(
                    f"{path[:120]!r} is not an absolute path without blanks",
                    hint="launchd and newsyslog split at blanks",
                    reason="BAD_SERVICE",
                )

    @property
    def label(self) -> str:
        """The service's name in launchd, equal to its file's name without the ending."""
        return launchd_label(self.component)

    @property
    def file_name(self) -> str:
        """The property list's name."""
        return f"{self.label}.plist"

    @property
    def rules_name(self) -> str:
        """The name of the file with its log's rotation."""
        return f"{self.label}.conf"

    @property
    def folder(self) -> str:
        """The component's state, the only folder that its account may write to."""
        return f"{self.state}/{self.component}"

    @property
    def log_file(self) -> str:
        """The component's log file, which it opens again after newsyslog moved it."""
        return f"{self.logs}/{self.component}.log"

    @property
    def crash_file(self) -> str:
        """What reaches standard output and error in spite of that; launchd holds it open."""
        return f"{self.logs}/{self.component}.crash.log"


def property_list(service: Service) -> dict[str, Any]:
    """The content of the service's property list, without secrets: everybody can read it."""
    config = [] if service.config is None else ["--config", service.config]
    words, flags = [service.component, "run"], ["--log-file", service.log_file]
    if service.component == "proxy":
        words = ["proxy", "--listen", service.listen, "--key-sha256", service.key_sha256]
        flags += ["--member", f"{service.state}/node/{CLIENT_FOLDER}"]
    else:
        flags += ["--state-dir", service.folder]
    return {
        "Label": service.label,
        "UserName": service.user,
        "ProgramArguments": [service.program, *config, *words, *flags],
        "WorkingDirectory": service.folder,
        "EnvironmentVariables": {
            "HOME": service.folder,
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "en_US.UTF-8",
        },
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": EXIT_TIME_OUT,
        "ProcessType": "Interactive",
        "Umask": _UMASK,
        "SoftResourceLimits": {"NumberOfFiles": 8192, "Core": 0},
        "HardResourceLimits": {"NumberOfFiles": 16384, "Core": 0},
        "StandardOutPath": service.crash_file,
        "StandardErrorPath": service.crash_file,
    }


def render(service: Service) -> bytes:
    """The property list as XML."""
    return plistlib.dumps(property_list(service), sort_keys=False)


def newsyslog_rules(service: Service) -> str:
    """Rules that rotate the log at 10 MiB: seven old ones, compressed, no signal (newsyslog.conf(5)).

    Not the crash file: launchd holds it open, so a moved one would go on growing under its new name.
    """
    heading = "# logfilename\t\t[owner:group]\tmode count size(KiB) when flags"
    return f"{heading}\n{service.log_file}\t{service.user}:wheel\t600 7 10240 * JN\n"


def write_examples(folder: Path) -> None:
    """Writes the property lists and the rules with their defaults, as they stand in `deploy/launchd`."""
    for service in map(Service, COMPONENTS):
        (folder / service.file_name).write_bytes(render(service))
        (folder / service.rules_name).write_text(newsyslog_rules(service))


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]))
