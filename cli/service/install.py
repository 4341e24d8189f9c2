"""Makes a service of a component: in steps that are undone again unless it is seen to run in the end."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sealring.cli.here.settings_files import as_toml, read_settings, settings_file_of
from sealring.cli.local.children import tail
from sealring.cli.service.launchctl import Launchctl
from sealring.cli.service.launchd import (
    NEWSYSLOG_FOLDER,
    STATE_FOLDER,
    Service,
    newsyslog_rules,
    render,
)
from sealring.cli.service.places import folder_of_root, make_places, needs_root, require_of_root, under
from sealring.cli.terminal.command import settings_model
from sealring.cli.terminal.host import SLOW_SECONDS, SLOW_START, START_SECONDS, Host
from sealring.cli.terminal.output import say
from sealring.mesh.errors import ConfigError, FailedPrecondition, SealringError
from sealring.mesh.settings.config import load
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.files import read_bounded, write_atomic
from sealring.mesh.system.paths import LAUNCH_DAEMONS, is_enrolled
from sealring.mesh.system.starting import starting
from sealring.node.models.folders import unreadable

_READ_SECONDS = 30.0
_POLL_SECONDS = 0.2
_ROLE_ACCOUNTS = range(200, 401)
"""User ids that macOS keeps for accounts of services (sysadminctl(8))."""


_BEGIN = {
    "node": "sudo sealring join --service TOKEN",
    "coordinator": "begin with --no-start; then, as the account {user}, sealring coordinator init, or restore"
    " from a sealring coordinator backup",
    "gateway": "begin with --no-start; then, as the account {user}, sealring gateway join TOKEN",
}
"""The command that puts a component's state into its service's folder."""


@dataclass(frozen=True)
class InstallStep:
    """Something to do, in words that follow "would", and how it is undone, half done or whole."""

    what: str
    do: Callable[[], None]
    undo: Callable[[], None] = lambda: None


def run_steps(steps: Sequence[InstallStep], say: Callable[[str], None], *, dry_run: bool = False) -> None:
    """Does all of it or, after an error, nothing. With `dry_run` it only says what would be done."""
    if dry_run:
        for step in steps:
            say(f"would {step.what}")
        return
    with ExitStack() as undoing:
        for step in steps:
            undoing.callback(_undo, step, say)
            step.do()
            say(f"done: {step.what}")
        undoing.pop_all()


def _undo(step: InstallStep, say: Callable[[str], None]) -> None:
    try:
        step.undo()
    except (OSError, SealringError) as error:
        say(f"could not undo: {step.what}: {error}")


class Installation:
    """A service that is to be installed below the prefix `root`.

    `chosen` are its settings (as it was started before, where None), written to a file of root's unless the
    service names one of its own.
    """

    started = "start {} and wait until it listens"

    def __init__(
        self, host: Host, service: Service, root: Path, *, chosen: Mapping[str, Any] | None = None
    ) -> None:
        self._host = host
        self._control = host.reach(Launchctl, host)
        self._root = root
        self._owner = account_id(service.user, root)
        self.state = under(root, service.folder)
        if chosen is None and service.config is None:
            chosen = read_settings(settings_file_of(self.state.parent, service.component), service.component)
        self._chosen = {name: value for name, value in (chosen or {}).items() if name != "state_dir"}
        if service.config is None and self._chosen:
            service = replace(service, config=str(settings_file_of(Path(STATE_FOLDER), service.component)))
        self.service = service
        self.plist = under(root, LAUNCH_DAEMONS / service.file_name)
        self._rules = under(root, NEWSYSLOG_FOLDER / service.rules_name)

    def check(self, *, start: bool) -> None:
        """Finds what is wrong before anything is done.

        Raises ConfigError (NOT_ENROLLED), FailedPrecondition (ADDRESS_IN_USE, UNSAFE_PLACE,
        MODEL_FOLDER_UNREADABLE).
        """
        component = self.service.component
        if "enclave_helper" in self._chosen:  # chosen by a user, run by the account whose keys it would see
            require_of_root(Path(self._chosen["enclave_helper"]))
        if component == "node":
            self._check_models(self._settings().models)
        if not start:
            return
        require_enrolled(self.service, self._root)
        host, port = self._address()
        if not self._control.status(self.service.label).loaded and self._host.listens(host, port):
            raise FailedPrecondition(
                f"something listens at {host}:{port} already, where the {component} is to",
                hint="stop what runs in the foreground first",
                reason="ADDRESS_IN_USE",
            )

    def steps(self, *, start: bool) -> Iterator[InstallStep]:
        """All that is to be done, in order."""
        service, control = self.service, self._control
        was_loaded = control.status(service.label).loaded
        if was_loaded:
            yield InstallStep(
                f"unload the {service.label} that runs now",
                lambda: control.bootout(service.label),
                lambda: control.bootstrap(service.label, self.plist),
            )
        yield InstallStep(
            f"make {self.state} and the log files, for the account {service.user}",
            lambda: make_places(service, self._root, self._owner),
        )
        if self._chosen and service.config is not None:
            text = as_toml(service.component, self._chosen)
            yield self._writing(under(self._root, service.config), text)
        yield self._writing(self.plist, render(service))
        yield self._writing(self._rules, newsyslog_rules(service).encode())
        if start:
            yield InstallStep(
                self.started.format(service.label),
                self._start,
                lambda: control.bootout(service.label),
            )

    def run(self, say: Callable[[str], None], *, start: bool, dry_run: bool) -> None:
        """Raises as `check`, FailedPrecondition (SERVICE_DID_NOT_START, UNSAFE_PLACE), PermissionDenied
        (NEEDS_ROOT); what was done is undone then."""
        try:
            self.check(start=start)
            run_steps(list(self.steps(start=start)), say, dry_run=dry_run)
        except PermissionError as error:
            raise needs_root(Path(str(error.filename))) from None

    def _writing(self, path: Path, content: bytes) -> InstallStep:
        try:
            before = read_bounded(path)
        except OSError:
            before = None

        def write(data: bytes) -> None:
            with folder_of_root(self._root, Path("/") / path.parent.relative_to(self._root)):
                write_atomic(path, data, mode=0o644)

        def undo() -> None:
            if before is None:
                path.unlink(missing_ok=True)
            else:
                write(before)

        return InstallStep(f"write {path}", lambda: write(content), undo)

    def _start(self) -> None:
        self._control.bootstrap(self.service.label, self.plist)
        self._wait_until_up(self._address(), under(self._root, self.service.log_file))

    def _wait_until_up(self, address: tuple[str, int], log: Path) -> None:
        """Returns once the service's process runs and somebody listens where it should."""
        label, begun, slow = self.service.label, self._host.monotonic(), False
        deadline = begun + START_SECONDS
        why = f"it did not listen at {address[0]}:{address[1]} within {START_SECONDS:g} s"
        while self._host.monotonic() < deadline:
            status = self._control.status(label)
            if status.last_exit[:1].isdigit():
                why = f"it ended with status {status.last_exit}"
                break
            if status.pid is not None and self._host.listens(*address):
                return
            self._host.pause(_POLL_SECONDS)
            if not slow and self._host.monotonic() - begun > SLOW_SECONDS:
                slow = True
                say(SLOW_START)
        raise FailedPrecondition(
            f"{label} does not come up: {why}; the end of {log}:\n{tail(log)}",
            hint="everything was put back as it was",
            reason="SERVICE_DID_NOT_START",
        )

    def _check_models(self, folders: Sequence[Path]) -> None:
        """Tries each folder as the account. That macOS keeps services from a place cannot be seen here: who
        calls sudo has Terminal's rights."""
        for folder in folders:
            if folder.is_dir() and not _may_read(folder, self._owner):
                error = unreadable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
                raise FailedPrecondition(
                    f"the account {self.service.user} cannot read the model folder {folder}",
                    hint=error.hint,
                    reason=error.reason,
                )

    def _settings(self) -> Any:
        """What the service is to be set to. Raises ConfigError."""
        component, file = self.service.component, None if self._chosen else self.service.config
        return load(
            settings_model(component),
            component,
            file=None if file is None else Path(file),
            flags=self._chosen,
            environment={},
        ).settings

    def _address(self) -> tuple[str, int]:
        """The address of the component as this machine reaches it. Raises ConfigError."""
        component, settings = self.service.component, self._settings()
        listen = getattr(settings, "grpc_listen" if component == "gateway" else "listen")
        host, port = parse_address(listen)
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port  # noqa: S104 - compared


def _may_read(folder: Path, account: int | None) -> bool:
    """Whether an account (None: this one) may list a folder and enter it."""
    try:
        with starting():
            tried = subprocess.run(  # noqa: S603 - fixed words, and the folder as an argument
                ["/bin/sh", "-c", 'cd -- "$0" && [ -r . ]', str(folder)],
                user=account,
                extra_groups=None if account is None else [],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_READ_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0


def account_id(user: str, root: Path) -> int | None:
    """The user id that gets the service's files; None where they cannot be given away.

    Raises ConfigError (NO_SUCH_USER), unless a package is made below a prefix.
    """
    try:
        found = pwd.getpwnam(user).pw_uid
    except KeyError:
        if root != Path("/"):
            return None
        taken = {entry.pw_uid for entry in pwd.getpwall()}
        free = next(number for number in reversed(_ROLE_ACCOUNTS) if number not in taken)
        raise ConfigError(
            f"there is no account {user}",
            hint=f"make it: sudo sysadminctl -addUser {user} -roleAccount -UID {free}",
            reason="NO_SUCH_USER",
        ) from None
    return found if os.geteuid() == 0 else None


def require_enrolled(service: Service, root: Path) -> None:
    """Raises ConfigError (NOT_ENROLLED) where the component has no state below the prefix `root`."""
    component, state = service.component, under(root, service.folder)
    if not is_enrolled(state / "operator" if component == "coordinator" else state):
        raise ConfigError(
            f"the {component} has no state yet in {state}",
            hint=_BEGIN[component].format(user=service.user),
            reason="NOT_ENROLLED",
        )
