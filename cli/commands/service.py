"""`sealring service`: the components as LaunchDaemons of a Mac."""

from __future__ import annotations

import enum
import os
import sysconfig
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.output import print_data, print_json, print_table, say
from sealring.cli.words import AsJson
from sealring.mesh.errors import ConfigError, NotFound, PermissionDenied

if TYPE_CHECKING:
    from sealring.cli.launchctl import Launchctl
    from sealring.cli.launchd import Service

app = typer.Typer(name="service", help="Run components under launchd (macOS).", no_args_is_help=True)


class Component(enum.StrEnum):
    """What can be a service."""

    COORDINATOR = "coordinator"
    NODE = "node"
    GATEWAY = "gateway"


Which = Annotated[Component, typer.Argument(metavar="COMPONENT", help="coordinator, node or gateway")]
Root = Annotated[
    Path, typer.Option("--root", hidden=True, help="prefix of every path, for packaging and tests")
]


@app.command()
def install(
    component: Which,
    user: Annotated[str, typer.Option(help="the account that it runs as")] = "_sealring",
    config: Annotated[Path | None, typer.Option(help="settings file that it reads", metavar="FILE")] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="load it right away")] = True,
    root: Root = Path("/"),
) -> None:
    """Write the property list and the log rotation, and start the service, now and at every boot."""
    from sealring.cli.launchd import Service, newsyslog_rules, render

    control = _launchctl()
    service = Service(
        component.value,
        program=_program(),
        user=user,
        config=None if config is None else str(config.absolute()),
    )
    _make_places(service, root)
    plist = _plist(service, root)
    _write(root, plist, render(service))
    _write(root, _rules(service, root), newsyslog_rules(service).encode())
    say(f"wrote {plist}")
    if start:
        control.bootout(service.label)
        control.bootstrap(service.label, plist)
        say(f"started {service.label}")


@app.command()
def uninstall(component: Which, root: Root = Path("/")) -> None:
    """Stop the service and remove its property list and log rotation; state and logs stay."""
    from sealring.cli.launchd import Service

    service = Service(component.value)
    control = _launchctl()
    control.bootout(service.label)
    for file in (_plist(service, root), _rules(service, root)):
        try:
            file.unlink(missing_ok=True)
        except PermissionError:
            raise _needs_root(file) from None
    say(f"removed {service.label}")


@app.command()
def start(component: Which, root: Root = Path("/")) -> None:
    """Load an installed service and start it."""
    from sealring.cli.launchd import Service

    service = Service(component.value)
    control = _launchctl()
    control.bootstrap(service.label, _installed(service, root))
    control.kickstart(service.label, kill=False)
    say(f"started {service.label}")


@app.command()
def stop(component: Which) -> None:
    """Unload the service and wait until it has ended; it comes back with `start` or at the next boot."""
    from sealring.cli.launchd import Service

    service = Service(component.value)
    _launchctl().bootout(service.label)
    say(f"stopped {service.label}")


@app.command()
def restart(component: Which, root: Root = Path("/")) -> None:
    """End the running service and start it again, with its property list read anew."""
    from sealring.cli.launchd import Service

    service = Service(component.value)
    control = _launchctl()
    plist = _installed(service, root)
    control.bootout(service.label)
    control.bootstrap(service.label, plist)
    control.kickstart(service.label, kill=False)
    say(f"restarted {service.label}")


@app.command()
def status(
    component: Annotated[Component | None, typer.Argument(metavar="[COMPONENT]")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what launchd says of the services."""
    from dataclasses import asdict

    from sealring.cli.launchd import Service

    control = _launchctl()
    wanted = [component] if component is not None else list(Component)
    found = [control.status(Service(one.value).label) for one in wanted]
    if as_json:
        print_json([asdict(one) for one in found])
        return
    rows = [[one.label, one.state if one.loaded else "not loaded", one.pid, one.last_exit] for one in found]
    print_table(["service", "state", "pid", "last exit"], rows)


@app.command()
def logs(
    component: Which,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100_000, help="last lines")] = 100,
    root: Root = Path("/"),
) -> None:
    """Print the last lines of a service's log."""
    from sealring.cli.launchd import Service

    _launchctl()
    service = Service(component.value)
    file = _under(root, Path(service.log_file))
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for line in deque(opened, maxlen=lines):
                print_data(line.rstrip("\n"))
    except FileNotFoundError:
        raise NotFound(
            f"{service.label} has no log {file}", hint="is it installed?", reason="NO_LOG"
        ) from None
    except PermissionError:
        raise _needs_root(file) from None


def _launchctl() -> Launchctl:
    from sealring.cli.launchctl import Launchctl

    return Launchctl()


def _program() -> str:
    path = Path(sysconfig.get_path("scripts"), "sealring")  # not PATH's, which may be anybody's
    if not os.access(path, os.X_OK):
        raise ConfigError(
            "the sealring command is not installed beside this Python",
            hint="install the package",
            reason="NO_PROGRAM",
        )
    return str(path)


def _under(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _plist(service: Service, root: Path) -> Path:
    from sealring.cli.launchd import PLIST_FOLDER

    return _under(root, PLIST_FOLDER) / service.file_name


def _rules(service: Service, root: Path) -> Path:
    from sealring.cli.launchd import NEWSYSLOG_FOLDER

    return _under(root, NEWSYSLOG_FOLDER) / service.rules_name


def _installed(service: Service, root: Path) -> Path:
    plist = _plist(service, root)
    if not plist.exists():
        raise NotFound(
            f"{service.label} is not installed",
            hint=f"sealring service install {service.component}",
            reason="SERVICE_NOT_INSTALLED",
        )
    return plist


def _make_places(service: Service, root: Path) -> None:
    from sealring.cli.service_places import make_places

    owner = _user_id(service.user) if os.geteuid() == 0 and root == Path("/") else None
    try:
        make_places(service, root, owner)
    except PermissionError as error:
        raise _needs_root(Path(str(error.filename))) from None


def _user_id(user: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(
            f"there is no user {user}",
            hint="make it with sysadminctl, or name another with --user",
            reason="NO_SUCH_USER",
        ) from None


def _write(root: Path, path: Path, content: bytes) -> None:
    from sealring.cli.service_places import folder_of_root
    from sealring.mesh.system.files import write_atomic

    try:
        with folder_of_root(root, Path("/") / path.parent.relative_to(root)):
            write_atomic(path, content, mode=0o644)
    except PermissionError:
        raise _needs_root(path) from None


def _needs_root(path: Path) -> PermissionDenied:
    return PermissionDenied(f"cannot write or read {path}", hint="run it with sudo", reason="NEEDS_ROOT")
