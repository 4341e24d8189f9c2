"""Runs the gateway: `sealring gateway run`."""

from __future__ import annotations

import asyncio
import signal

import structlog

from gateway.credentials import CertificateKeeper, load_gateway, lock_state
from gateway.http.app import create_app
from gateway.http.server import HttpServer
from gateway.inference import SERVICE, InferenceService, RingBackend
from gateway.metrics import Metrics
from gateway.rings import Rings
from gateway.rosters import RosterKeeper
from gateway.settings import GatewaySettings
from gateway.watch import Watch
from mesh.certificates import Role, role_server_name
from mesh.rpc import Server
from mesh.tls import PeerChannel, TlsStore
from sealring.v1 import inference_pb2_grpc as inference_grpc

log = structlog.get_logger()


async def run(settings: GatewaySettings) -> None:
    """The gateway, until SIGTERM or SIGINT.

    Raises ConfigError (NOT_ENROLLED, MEMBER_STATE_CORRUPT, CANNOT_LISTEN), Conflict (STATE_IN_USE),
    RosterError (ROSTER_STATE_*) at the start, and PermissionDenied (REMOVED) when the operator throws the
    gateway out.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    try:
        with lock_state(settings.state_dir):
            await serve(settings, stop)
    finally:
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(sign)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """The gateway, until `stop` is set. Raises as `run`."""
    state, signer = load_gateway(settings.state_dir)
    store = TlsStore(state.tls)
    keeper = RosterKeeper(settings.state_dir, state)
    keeper.load()
    metrics = Metrics()
    rings = Rings(
        state.peer.cluster,
        store,
        queue_limit=settings.queue_limit,
        metrics=metrics,
        signed_roster=keeper.signed,
    )
    backend = RingBackend(rings, metrics)
    channel = PeerChannel(state.coordinator, store, role_server_name(Role.COORDINATOR))
    certificates = CertificateKeeper(settings.state_dir, state, store, signer, channel, keeper.follow_root)
    watch = Watch(channel, keeper, rings, certificates.renew)
    edge = HttpServer(create_app(backend, exposition=metrics.exposition))
    server = Server([(inference_grpc.add_InferenceServicer_to_server, InferenceService(backend), SERVICE)])
    try:
        grpc_port = server.listen(settings.grpc_listen, None)
        http_port = edge.listen(settings.http_listen)
        await server.start()
        await edge.start()
        log.info("gateway started", gateway=state.peer.id, http_port=http_port, grpc_port=grpc_port)
        await _until(stop, watch, certificates)
        await server.set_serving(False)
        await backend.drain(settings.drain_seconds)
    finally:
        await edge.stop()
        await server.stop(1.0)
        await rings.close()
        await channel.close()
        log.info("gateway stopped", gateway=state.peer.id)


async def _until(stop: asyncio.Event, watch: Watch, certificates: CertificateKeeper) -> None:
    tasks = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(watch.run()),
        asyncio.create_task(certificates.run()),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
