"""`sealring service`: the components as LaunchDaemons of a Mac."""

from __future__ import annotations

import enum
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.command import command
from cli.output import print_json, print_table, say
from cli.words import AsJson
from mesh.errors import ConfigError, NotFound, PermissionDenied

if TYPE_CHECKING:
    from cli.launchctl import Launchctl
    from cli.launchd import Service

app = typer.Typer(name="service", help="Run components under launchd (macOS).", no_args_is_help=True)


class Component(enum.StrEnum):
    """What can be a service."""

    COORDINATOR = "coordinator"
    NODE = "node"
    GATEWAY = "gateway"


Which = Annotated[Component, typer.Argument(metavar="COMPONENT", help="coordinator, node or gateway")]
Root = Annotated[
    Path, typer.Option("--prefix", hidden=True, help="prefix of every path, for packaging and tests")
]


@command(app, example="sealring service install node --config /etc/sealring.toml")
def install(
    component: Which,
    user: Annotated[str, typer.Option(metavar="NAME", help="the account that it runs as")] = "_sealring",
    config: Annotated[Path | None, typer.Option(help="settings file that it reads", metavar="FILE")] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="load it right away")] = True,
    root: Root = Path("/"),
) -> None:
    """Start a component now and at every boot.

    Writes its property list and the rotation of its log.
    """
    from cli.launchd import Service, newsyslog_rules, render

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


@command(app, example="sealring service uninstall node")
def uninstall(component: Which, root: Root = Path("/")) -> None:
    """Stop a service and remove it; its state and logs stay."""
    from cli.launchd import Service

    service = Service(component.value)
    control = _launchctl()
    control.bootout(service.label)
    for file in (_plist(service, root), _rules(service, root)):
        try:
            file.unlink(missing_ok=True)
        except PermissionError:
            raise _needs_root(file) from None
    say(f"removed {service.label}")


@command(app, example="sealring service start node")
def start(component: Which, root: Root = Path("/")) -> None:
    """Load an installed service and start it."""
    from cli.launchd import Service

    service = Service(component.value)
    control = _launchctl()
    control.bootstrap(service.label, _installed(service, root))
    control.kickstart(service.label, kill=False)
    say(f"started {service.label}")


@command(app, example="sealring service stop node")
def stop(component: Which) -> None:
    """Stop a service until `start` or the next boot."""
    from cli.launchd import Service

    service = Service(component.value)
    _launchctl().bootout(service.label)
    say(f"stopped {service.label}")


@command(app, example="sealring service restart node")
def restart(component: Which, root: Root = Path("/")) -> None:
    """Stop a service and start it again, with its property list read anew."""
    from cli.launchd import Service

    service = Service(component.value)
    control = _launchctl()
    plist = _installed(service, root)
    control.bootout(service.label)
    control.bootstrap(service.label, plist)
    control.kickstart(service.label, kill=False)
    say(f"restarted {service.label}")


@command(app, example="sealring service status")
def status(
    component: Annotated[
        Component | None,
        typer.Argument(metavar="COMPONENT", help="coordinator, node or gateway [default: all]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what launchd says of the services."""
    from dataclasses import asdict

    from cli.launchd import Service

    control = _launchctl()
    wanted = [component] if component is not None else list(Component)
    found = [control.status(Service(one.value).label) for one in wanted]
    if as_json:
        print_json([asdict(one) for one in found])
        return
    rows = [[one.label, one.state if one.loaded else "not loaded", one.pid, one.last_exit] for one in found]
    print_table(["service", "state", "pid", "last exit"], rows)


def _launchctl() -> Launchctl:
    from cli.launchctl import Launchctl

    return Launchctl()


def _program() -> str:
    path = Path(sysconfig.get_path("scripts"), "sealring")  # not PATH's, which may be anybody's
    if not os.access(path, os.X_OK):
        raise ConfigError(
            "the `sealring` command is not installed beside this Python",
            hint="install the package",
            reason="NO_PROGRAM",
        )
    return str(path)


def _under(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _plist(service: Service, root: Path) -> Path:
    from cli.launchd import PLIST_FOLDER

    return _under(root, PLIST_FOLDER) / service.file_name


def _rules(service: Service, root: Path) -> Path:
    from cli.launchd import NEWSYSLOG_FOLDER

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
    from cli.service_places import make_places

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
    from cli.service_places import folder_of_root
    from mesh.statefiles import write_atomic

    try:
        with folder_of_root(root, Path("/") / path.parent.relative_to(root)):
            write_atomic(path, content, mode=0o644)
    except PermissionError:
        raise _needs_root(path) from None


def _needs_root(path: Path) -> PermissionDenied:
    return PermissionDenied(f"cannot write or read {path}", hint="run it with sudo", reason="NEEDS_ROOT")
