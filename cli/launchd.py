"""launchd property lists and newsyslog rules for the three components (launchd.plist(5), newsyslog.conf(5)).

launchd and plistlib take unknown and misspelt keys in silence, so every key is checked against a list first.
"""

from __future__ import annotations

import plistlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from sealring.mesh.errors import InvalidInput

COMPONENTS = ("coordinator", "node", "gateway")
PREFIX = "org.sealring"
PLIST_FOLDER = Path("/Library/LaunchDaemons")
NEWSYSLOG_FOLDER = Path("/etc/newsyslog.d")
LOG_FOLDER = PurePosixPath("/var/log/sealring")
STATE_FOLDER = PurePosixPath("/usr/local/var/sealring")
DRAIN_SECONDS = 30
EXIT_TIME_OUT = DRAIN_SECONDS + 15
_UMASK = 0o077

KNOWN_KEYS: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {
        "Label": str,
        "UserName": str,
        "GroupName": str,
        "ProgramArguments": list,
        "WorkingDirectory": str,
        "EnvironmentVariables": dict,
        "RunAtLoad": bool,
        "KeepAlive": (bool, dict),
        "ThrottleInterval": int,
        "ExitTimeOut": int,
        "ProcessType": str,
        "Umask": int,
        "SoftResourceLimits": dict,
        "HardResourceLimits": dict,
        "StandardOutPath": str,
        "StandardErrorPath": str,
    }
)
KNOWN_NESTED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "KeepAlive": frozenset({"SuccessfulExit", "Crashed"}),
        "SoftResourceLimits": frozenset({"NumberOfFiles", "Core"}),
        "HardResourceLimits": frozenset({"NumberOfFiles", "Core"}),
        "EnvironmentVariables": frozenset({"HOME", "PATH", "LANG"}),
    }
)
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
        return f"{PREFIX}.{self.component}"

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
        """Where the component writes its log; it opens the file again after newsyslog moved it."""
        return f"{self.logs}/{self.component}.log"

    @property
    def crash_file(self) -> str:
        """What reaches standard output and error in spite of that; launchd holds it open."""
        return f"{self.logs}/{self.component}.crash.log"


def property_list(service: Service) -> dict[str, Any]:
    """The checked content of the service's property list, without secrets: everybody can read it."""
    config = [] if service.config is None else ["--config", service.config]
    flags = ["--log-file", service.log_file, "--state-dir", service.folder]
    content: dict[str, Any] = {
        "Label": service.label,
        "UserName": service.user,
        "ProgramArguments": [service.program, *config, service.component, "run", *flags],
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
    check_property_list(content)
    return content


def check_property_list(content: Mapping[str, Any]) -> None:
    """Raises InvalidInput (BAD_PROPERTY_LIST) for a key or a type that launchd would pass over in silence."""
    for key, value in content.items():
        expected = KNOWN_KEYS.get(key)
        if expected is None:
            raise _bad(f"launchd knows no key {key[:60]}")
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
            raise _bad(f"{key} is a {type(value).__name__}")
        for inner in value if isinstance(value, dict) else ():
            if inner not in KNOWN_NESTED[key]:
                raise _bad(f"launchd knows no key {inner[:60]} in {key}")
    arguments = content.get("ProgramArguments") or [""]
    if not all(isinstance(argument, str) for argument in arguments) or not arguments[0].startswith("/"):
        raise _bad("ProgramArguments does not begin with an absolute path")
    if content.get("ExitTimeOut", 0) <= DRAIN_SECONDS:
        raise _bad("ExitTimeOut is not above the drain time")


def render(service: Service) -> bytes:
    """The property list as XML."""
    return plistlib.dumps(property_list(service), sort_keys=False)


def newsyslog_rules(service: Service) -> str:
    """Rules that rotate the log at 10 MiB: seven old ones, compressed, no signal (newsyslog.conf(5)).

    Not the crash file: launchd holds it open, so a moved one would go on growing under its new name.
    """
    heading = "# logfilename\t\t[owner:group]\tmode count size(KiB) when flags"
    return f"{heading}\n{service.log_file}\t{service.user}:wheel\t600 7 10240 * JN\n"


def _bad(what: str) -> InvalidInput:
    return InvalidInput(f"the property list is refused: {what}", reason="BAD_PROPERTY_LIST")


def write_examples(folder: Path) -> None:
    """Writes the property lists and the rules with their defaults, as they stand in `deploy/launchd`."""
    for service in map(Service, COMPONENTS):
        (folder / service.file_name).write_bytes(render(service))
        (folder / service.rules_name).write_text(newsyslog_rules(service))


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]))
