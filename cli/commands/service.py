"""`sealring service`: the components as LaunchDaemons of a Mac."""

from __future__ import annotations

import enum
import os
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.service.launchctl import Launchctl
from sealring.cli.service.launchd import NEWSYSLOG_FOLDER, Service
from sealring.cli.service.places import needs_root, under
from sealring.cli.terminal.command import command
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import print_json, print_table, say
from sealring.mesh.errors import ConfigError, NotFound
from sealring.mesh.system.paths import LAUNCH_DAEMONS

app = typer.Typer(name="service", help="Run components under launchd (macOS).", no_args_is_help=True)


class Component(enum.StrEnum):
    """What can be a service."""

    COORDINATOR = "coordinator"
    NODE = "node"
    GATEWAY = "gateway"
    PROXY = "proxy"


_COMPONENTS = "coordinator, node, gateway or proxy"
Which = Annotated[Component, typer.Argument(metavar="COMPONENT", help=_COMPONENTS)]
User = Annotated[str, typer.Option(metavar="NAME", help="the account that it runs as")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done, and do nothing")]
Root = Annotated[
    Path, typer.Option("--prefix", hidden=True, help="prefix of every path, for packaging and tests")
]


@command(app, example="sealring service install node --config /etc/sealring.toml")
def install(
    context: typer.Context,
    component: Which,
    user: User = "_sealring",
    config: Annotated[Path | None, typer.Option(help="settings file that it reads", metavar="FILE")] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="load it right away")] = True,
    dry_run: DryRun = False,
    root: Root = Path("/"),
) -> None:
    """Make a component a service: it starts now and at every boot.

    If it does not come up, everything is undone.
    """
    from sealring.cli.local.foreground import signals_as_exceptions
    from sealring.cli.service.door import DoorInstallation
    from sealring.cli.service.install import Installation

    signals_as_exceptions()  # a closed terminal undoes what was begun, as Ctrl-C does
    service = Service(
        component.value,
        program=program(),
        user=user,
        config=None if config is None else str(config.absolute()),
    )
    kind = DoorInstallation if component is Component.PROXY else Installation
    kind(host_of(context), service, root).run(say, start=start, dry_run=dry_run)


@command(app, example="sealring service uninstall node")
def uninstall(context: typer.Context, component: Which, root: Root = Path("/")) -> None:
    """Stop a service and remove it; its state and logs stay. The node's takes the proxy's along."""
    from sealring.cli.setup.door import forget_door

    control = _launchd(context)
    had_door = _plist(Service(Component.PROXY.value), root).exists()
    for service in reversed(_with_door(component, root)):
        control.bootout(service.label)
        for file in (LAUNCH_DAEMONS / service.file_name, NEWSYSLOG_FOLDER / service.rules_name):
            file = under(root, file)
            try:
                file.unlink(missing_ok=True)
            except PermissionError:
                raise needs_root(file) from None
        say(f"removed {service.label}")
    if had_door and component in (Component.NODE, Component.PROXY):
        forget_door(host_of(context))


@command(app, example="sealring service start node")
def start(context: typer.Context, component: Which, root: Root = Path("/")) -> None:
    """Load an installed service and start it; the node's takes the proxy's along."""
    control = _launchd(context)
    for service in _with_door(component, root):
        control.bootstrap(service.label, _installed(service, root))
        control.kickstart(service.label)
        say(f"started {service.label}")


@command(app, example="sealring service stop node")
def stop(context: typer.Context, component: Which, root: Root = Path("/")) -> None:
    """Stop a service until `start` or the next boot; the node's takes the proxy's along."""
    control = _launchd(context)
    for service in reversed(_with_door(component, root)):
        control.bootout(service.label)
        say(f"stopped {service.label}")


@command(app, example="sealring service restart node")
def restart(context: typer.Context, component: Which, root: Root = Path("/")) -> None:
    """Stop a service and start it again, with its property list read anew; the node's takes the proxy's
    along."""
    control = _launchd(context)
    for service in _with_door(component, root):
        plist = _installed(service, root)
        control.bootout(service.label)
        control.bootstrap(service.label, plist)
        control.kickstart(service.label)
        say(f"restarted {service.label}")


@command(app, example="sealring service status")
def status(
    context: typer.Context,
    component: Annotated[
        Component | None,
        typer.Argument(metavar="COMPONENT", help=f"{_COMPONENTS} [default: all]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what launchd says of the services."""
    from dataclasses import asdict

    control = _launchd(context)
    wanted = [component] if component is not None else list(Component)
    found = [control.status(Service(one.value).label) for one in wanted]
    if as_json:
        print_json([asdict(one) for one in found])
        return
    rows = [[one.label, one.state if one.loaded else "not loaded", one.pid, one.last_exit] for one in found]
    print_table(["service", "state", "pid", "last exit"], rows)


def _launchd(context: typer.Context) -> Launchctl:
    host = host_of(context)
    return host.reach(Launchctl, host)


def program() -> str:
    """The `sealring` that services run. Raises ConfigError (NO_PROGRAM)."""
    path = Path(sysconfig.get_path("scripts"), "sealring")  # not PATH's, which may be anybody's
    if not os.access(path, os.X_OK):
        raise ConfigError(
            "the `sealring` command is not installed beside this Python",
            hint="install the package",
            reason="NO_PROGRAM",
        )
    return str(path)


def _with_door(component: Component, root: Path) -> list[Service]:
    """A component's service; behind the node's that of the proxy, where it is installed."""
    found, door = [Service(component.value)], Service(Component.PROXY.value)
    return [*found, door] if component is Component.NODE and _plist(door, root).exists() else found


def _plist(service: Service, root: Path) -> Path:
    return under(root, LAUNCH_DAEMONS / service.file_name)


def _installed(service: Service, root: Path) -> Path:
    plist = _plist(service, root)
    if not plist.exists():
        raise NotFound(
            f"{service.label} is not installed",
            hint=f"sealring service install {service.component}",
            reason="SERVICE_NOT_INSTALLED",
        )
    return plist
