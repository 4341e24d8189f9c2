"""Calls to the coordinator's Admin service with the operator bundle."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sealring.cli.calls.gateway import named
from sealring.cli.here.found import require_account
from sealring.cli.terminal.host import host_of
from sealring.mesh.errors import ConfigError, SealringError

if TYPE_CHECKING:
    import typer

    from sealring.cli.settings import CliSettings
    from sealring.mesh.member.state import MachineState
    from sealring.mesh.pki.root import RootMetadata

T = TypeVar("T")

_POLL_SECONDS = 0.2
_REACH_SECONDS = 4.0
"""How long a connection to one address may take."""


@dataclass(frozen=True)
class Admin:
    """The Admin service of one coordinator."""

    stub: Any
    address: str
    seconds: float
    root: RootMetadata | None = None
    """As the bundle has it."""

    async def call(
        self, method: str, *, seconds: float | None = None, wait_for_ready: bool = False, **fields: Any
    ) -> Any:
        """One call with these fields of its request. Raises the error that the coordinator answered with."""
        import grpc
        from google.protobuf.message_factory import GetMessageClass

        from sealring.mesh.rpc.protocol12 import read_singly
        from sealring.mesh.rpc.status import from_rpc_error
        from sealring.v1 import admin_pb2

        described = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name[method]
        request = GetMessageClass(described.input_type)(**fields)
        try:
            answer = await getattr(self.stub, method)(
                request, timeout=seconds or self.seconds, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError as error:
            failed = named(from_rpc_error(error), "the coordinator", self.address)
            if failed.reason == "MEMBERS_READ":
                host = failed.metadata.get("machine", "")
                where = f"the first machine{f' ({host})' * bool(host)}"
                failed.hint = f"type on {where}: {shlex.join(['sealring', *sys.argv[1:]])}"
            raise failed from None
        for node in answer.nodes if method == "ListNodes" else ():
            read_singly(node, "heartbeat")
            node.heartbeat.SetInParent()  # also of a node that is offline
        return answer


@asynccontextmanager
async def connect(bundle: Path, *, address: str | None = None, seconds: float = 30.0) -> AsyncIterator[Admin]:
    """A channel to the coordinator that the bundle belongs to, by mTLS.

    Raises ConfigError (NO_OPERATOR_BUNDLE), and what `read_bundle` raises.
    """
    state = read_bundle(bundle)  # without one the command ends here, and grpc is not imported

    from sealring.mesh.pki.certificates import Role, role_server_name
    from sealring.mesh.rpc.tls import channel_options, secure_channel
    from sealring.v1 import admin_pb2_grpc

    options = channel_options(role_server_name(Role.COORDINATOR))
    target = address or await _coordinator(bundle, state)
    async with secure_channel(target, state.tls, options) as channel:
        yield Admin(admin_pb2_grpc.AdminStub(channel), target, seconds, state.root)


async def _coordinator(bundle: Path, state: MachineState) -> str:
    """The address (host:port) of a bundle; a member's programs know those of the roster as well, for another
    machine may have taken over."""
    from sealring.mesh.member.state import ROSTER
    from sealring.mesh.pki.certificates import Role, role_server_name
    from sealring.mesh.roster.reader import check_roster
    from sealring.mesh.rpc.reach import connected, first_of
    from sealring.mesh.rpc.tls import PeerChannel, TlsStore
    from sealring.mesh.system.files import read_bounded

    if state.peer.role is not Role.CLIENT:
        return state.coordinator
    try:
        roster = check_roster(read_bounded(bundle.parent / ROSTER), state.root, now=time.time())
    except (OSError, SealringError):
        return state.coordinator
    store, name = TlsStore(state.tls), role_server_name(Role.COORDINATOR)
    found = await first_of(
        (state.coordinator, *roster.coordinators),
        lambda one: connected(one, store, name, seconds=_REACH_SECONDS),
        PeerChannel.close,
    )
    if found is None:
        return state.coordinator
    await found.close()
    return found.address


def read_bundle(folder: Path) -> MachineState:
    """The operator bundle in `folder`, its root metadata verified against its pin.

    Raises ConfigError (NO_OPERATOR_BUNDLE, MEMBER_STATE_CORRUPT, SECRET_FILE_UNSAFE), PermissionDenied
    (OTHERS_STATE), RosterError (ROOT_*).
    """
    from sealring.mesh.member.state import load_machine_state
    from sealring.mesh.pki.certificates import Role, valid_at
    from sealring.mesh.pki.root import check_root_times

    require_account(folder)
    try:
        state = load_machine_state(folder)
    except PermissionError:
        raise _no_bundle(f"the operator bundle in {folder} cannot be read") from None
    except ConfigError as error:
        if error.reason != "NOT_ENROLLED":
            raise
        raise _no_bundle(f"this machine has no operator's key: there is none in {folder}") from None
    if state.peer.role not in (Role.OPERATOR, Role.CLIENT):
        raise _no_bundle(f"{folder} holds the enrolment of a {state.peer.role}, not an operator bundle")
    check_root_times(state.root, now=time.time())
    if not valid_at(state.tls.certificate, time.time()) and state.peer.role is Role.CLIENT:
        raise ConfigError(
            f"the certificate in {folder} with which this member's programs may look has ended",
            hint="its node renews it: start `sealring join`; compare the clocks of both machines",
            reason="OPERATOR_CERTIFICATE_EXPIRED",
        )
    if not valid_at(state.tls.certificate, time.time()):
        raise ConfigError(
            f"the certificate of the operator bundle in {folder} is not valid now",
            hint="copy the bundle again: a running coordinator renews the one in its state folder; compare "
            "the clocks of both machines",
            reason="OPERATOR_CERTIFICATE_EXPIRED",
        )
    return state


async def wait_for_bundle(folder: Path, address: str, *, seconds: float) -> None:
    """Waits until the bundle leads to the coordinator's main `address` (host:port), for `seconds` at most.

    The address may have changed since the last start. A coordinator that was off for a month renews the
    bundle when it starts. Raises as `read_bundle`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            if read_bundle(folder).coordinator == address:
                return
        except ConfigError as error:
            if error.reason != "OPERATOR_CERTIFICATE_EXPIRED" or loop.time() > deadline:
                raise
        if loop.time() > deadline:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _no_bundle(what: str) -> ConfigError:
    return ConfigError(
        what,
        hint="run it on the cluster's first machine, or name a copy of that machine's operator folder with "
        "--operator; `sealring up` makes a new cluster here; about this machine alone: sealring doctor",
        reason="NO_OPERATOR_BUNDLE",
    )


def run_admin(context: typer.Context, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Runs `work` with the Admin service that the settings of this call name."""
    from sealring.cli.terminal.command import load_settings

    settings: CliSettings = load_settings(context).settings
    host = host_of(context)

    async def run() -> T:
        async with host.reach(
            connect, settings.operator, address=settings.coordinator, seconds=settings.timeout
        ) as admin:
            return await work(admin)

    return host.run(run())


def call_admin(context: typer.Context, method: str, **request: Any) -> Any:
    """One call of the Admin service, with the arguments of `Admin.call`."""
    return run_admin(context, lambda admin: admin.call(method, **request))
