"""Runs the node daemon: `sealring node run`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import structlog

from sealring.mesh.crypto.identity import Signer, member_id
from sealring.mesh.errors import ConfigError
from sealring.mesh.member.state import MachineState, load_machine_state
from sealring.mesh.pki.certificates import Role
from sealring.mesh.rpc.server import Server
from sealring.mesh.rpc.tls import server_credentials
from sealring.mesh.system.processes import run_enrolled
from sealring.node.control import service as control
from sealring.node.control.service import ControlService, add_control_to_server
from sealring.node.daemon import diagnosis, measuring
from sealring.node.daemon.daemon import Daemon
from sealring.node.daemon.diagnosis import DiagnosisService
from sealring.node.daemon.supervisor import Child, Spawn
from sealring.node.identity.attestor import require_software_allowed
from sealring.node.identity.choice import load_signer
from sealring.node.link import exchange
from sealring.node.models import giving
from sealring.node.scratch import is_private
from sealring.node.settings import NodeSettings
from sealring.node.stored import giving as stored
from sealring.v1 import diagnosis_pb2_grpc, links_pb2_grpc, models_pb2_grpc

log = structlog.get_logger()

_STOP_SECONDS = 2.0


async def run(settings: NodeSettings) -> None:
    """The daemon, until SIGTERM or SIGINT.

    Raises ConfigError (NOT_ENROLLED, MEMBER_STATE_CORRUPT, CANNOT_LISTEN), Conflict (STATE_IN_USE),
    RosterError (ROSTER_STATE_*) at the start. Returns as well when the operator evicts or bans the node, once
    everything is dropped: starting it again is of no use.
    """

    async def enrolled(stop: asyncio.Event) -> None:
        keep_temporary_files(settings.state_dir)
        await serve(settings, stop)

    await run_enrolled(settings.state_dir, enrolled)


async def serve(settings: NodeSettings, stop: asyncio.Event, *, spawn: Spawn = Child.spawn) -> None:
    """The daemon, until `stop` is set. `spawn` starts its engines and carriers. Raises as `run`, and
    PermissionDenied (REMOVED)."""
    state = load_machine_state(settings.state_dir)
    signer = await asyncio.to_thread(_signer, settings, state)
    require_software_allowed(signer.key_type, allowed=settings.software_identity_allowed)
    daemon = Daemon(settings, state, signer, spawn=spawn)
    server = Server(
        [
            (links_pb2_grpc.add_LinksServicer_to_server, daemon.handshakes, exchange.SERVICE),
            (links_pb2_grpc.add_WaysServicer_to_server, daemon.measuring, measuring.SERVICE),
            (models_pb2_grpc.add_ModelsServicer_to_server, daemon.models, giving.SERVICE),
            (links_pb2_grpc.add_BlocksServicer_to_server, daemon.blocks, stored.SERVICE),
            (add_control_to_server, ControlService(daemon), control.SERVICE),
            (
                diagnosis_pb2_grpc.add_DiagnosisServicer_to_server,
                DiagnosisService(daemon.diagnosis, state.peer),
                diagnosis.SERVICE,
            ),
        ]
    )
    port = server.listen(settings.bound, server_credentials(daemon.store))
    await server.start()
    log.info("node_started", node=state.peer.id, cluster=state.peer.cluster, port=port)
    try:
        await daemon.run(lambda: settings.advertised(port), stop)
    finally:
        await server.stop(_STOP_SECONDS)
        log.info("node_stopped", node=state.peer.id)


def _signer(settings: NodeSettings, state: MachineState) -> Signer:
    """The identity of this enrolment; blocks. Raises ConfigError (MEMBER_STATE_CORRUPT), Unavailable."""
    folder = settings.state_dir
    try:
        signer = load_signer(settings)
    except FileNotFoundError:
        raise _not_ours(folder) from None
    if state.peer.role is not Role.MEMBER or member_id(signer.public_key) != state.peer.id:
        raise _not_ours(folder)
    return signer


def keep_temporary_files(state_dir: Path) -> None:
    """Children put theirs, and the code that MLX compiles and runs, where nobody else can write."""
    if is_private(Path(tempfile.gettempdir())):
        return
    folder = state_dir / "tmp"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = str(folder)


def _not_ours(folder: Path) -> ConfigError:
    return ConfigError(
        f"the enrolment in {folder} and its identity key do not belong together, or are not a node's",
        hint="restore the folder from a backup, or join again in another one",
        reason="MEMBER_STATE_CORRUPT",
    )
