"""Runs the gateway: `sealring gateway run`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from pathlib import Path

import structlog
from starlette.types import ASGIApp

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.access.gate import Gate, Limits
from sealring.edge.access.interceptor import Admit, GateInterceptor, by_key
from sealring.edge.access.keyfile import LAN_FOLDER, KeyFile
from sealring.edge.access.quota import Quotas
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.inference.kept import KeptAnswers
from sealring.edge.inference.service import SERVICE, InferenceService
from sealring.edge.metrics import Metrics
from sealring.gateway.backend import RingBackend
from sealring.gateway.door import MEMBERS, MemberDoor
from sealring.gateway.join import load_gateway
from sealring.gateway.lan.door import LanDoor
from sealring.gateway.rings.members import Members
from sealring.gateway.rings.rings import Rings
from sealring.gateway.rings.watch import Watch
from sealring.gateway.settings import GatewaySettings
from sealring.gateway.usage.store import UsageStore
from sealring.gateway.usage.usage import Usage
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import ConfigError
from sealring.mesh.member.certificate_keeper import CertificateKeeper
from sealring.mesh.member.coordinators import Coordinators, look_for_coordinator
from sealring.mesh.member.introduction import Introduction
from sealring.mesh.member.proof import Credentials, Purpose, by_identity
from sealring.mesh.member.roster_keeper import RosterKeeper
from sealring.mesh.rpc.server import INFERENCE, Port, Server
from sealring.mesh.rpc.tls import TlsStore, server_credentials
from sealring.mesh.system.processes import first_of, run_enrolled
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc
from sealring.v1 import membership_pb2 as membership

log = structlog.get_logger()


async def run(settings: GatewaySettings) -> None:
    """The gateway, until SIGTERM or SIGINT.

    Raises ConfigError (NOT_ENROLLED, MEMBER_STATE_CORRUPT, CANNOT_LISTEN, NO_KEYS, KEYS_CORRUPT,
    BAD_TLS_FILES, SECRET_FILE_UNSAFE), Conflict (STATE_IN_USE),
    RosterError (ROSTER_STATE_*) at the start. Returns as well when the operator throws the gateway out:
    starting it again is of no use.
    """
    await run_enrolled(settings.state_dir, lambda stop: serve(settings, stop))


async def serve(
    settings: GatewaySettings,
    stop: asyncio.Event,
    *,
    clock: Clock = wall_clock,
    http: Callable[..., HttpServer] = HttpServer,
) -> None:
    """The gateway, until `stop` is set. `clock` tells when a roster has expired; `http` makes the HTTP edge.

    Raises as `run`, and PermissionDenied (REMOVED).
    """
    state, signer = load_gateway(settings.state_dir)
    store = TlsStore(state.tls)
    keeper = RosterKeeper(settings.state_dir, state, clock=clock)
    keeper.load()
    metrics = Metrics()
    names: dict[str, str] = {}
    usage = Usage(UsageStore(settings.state_dir), lambda key: names.get(key, ""), clock=clock)
    metrics.registry.register(usage)
    identity = Credentials(state.peer.cluster, state.peer.id, by_identity(signer), lambda: keeper.held)
    rings = Rings(
        Members(state.peer.cluster, store, identity),
        queue_limit=settings.queue_limit,
        idle_prefill=settings.idle_prefill,
        metrics=metrics,
        signed_roster=keeper.signed,
        here=settings.members_hosts,
    )
    gate, lan_gate = _gates(settings, metrics)
    quotas = Quotas(
        lambda key: gate.quota(key) or lan_gate.quota(key), usage.spent, _counting(metrics), clock
    )
    backend = RingBackend(rings, metrics, usage.add, quotas)
    find = partial(look_for_coordinator, state.root_sha256)
    coordinators = Coordinators(state.coordinator, store, lambda: keeper.coordinators, find)
    certificates = CertificateKeeper(
        settings.state_dir, state, store, signer, coordinators, keeper.follow_root
    )
    channel = coordinators.channel
    introduction = Introduction(Purpose.WATCH, identity, channel, lambda: keeper.root, certificates.renew)
    http_tls = _tls(settings.http_tls_certificate, settings.http_tls_key)
    grpc_tls = _tls(settings.grpc_tls_certificate, settings.grpc_tls_key)
    door = MemberDoor(state.peer.cluster, lambda: keeper.valid, _limits(settings), _counting(metrics))
    edge, server, members, serve_lan = _edges(
        settings, backend, metrics, usage, gate, lan_gate, door, http_tls, http
    )
    folder, cluster = settings.state_dir / LAN_FOLDER, state.peer.cluster
    lan = LanDoor(folder, settings.lan_listen, cluster, lan_gate, serve_lan)
    port = (
        members.listen(settings.members_listen, server_credentials(store)) if settings.members_listen else 0
    )
    watch = Watch(
        coordinators,
        introduction,
        keeper,
        rings,
        certificates.renew,
        lambda: membership.Door(addresses=settings.members_addresses(port), lan=lan.addresses()),
        names,
    )
    try:
        grpc_port = server.listen(settings.grpc_listen, grpc_tls.grpc_credentials() if grpc_tls else None)
        http_port = edge.listen(settings.http_listen)
        for one in (server, members) if port else (server,):
            await one.start()
        await edge.start()
        log.info(
            "gateway_started",
            gateway=state.peer.id,
            http_port=http_port,
            grpc_port=grpc_port,
            members_port=port,
            keys_required=gate.required,
        )
        renewing = [tls.run() for tls in (http_tls, grpc_tls) if tls]
        working = (watch, certificates, gate, usage, door, lan)
        await first_of(stop.wait(), *(one.run() for one in working), *renewing)
        await server.set_serving(False)
        await backend.drain(settings.drain_timeout)
    finally:
        await rings.close()  # first, while the edges still run: clients of unfinished answers get the reason
        await asyncio.gather(edge.stop(), lan.stop())
        await asyncio.gather(server.stop(1.0), *([members.stop(1.0)] if port else []))
        await asyncio.gather(gate.flush(), lan_gate.flush())
        await usage.flush()
        await coordinators.close()
        log.info("gateway_stopped", gateway=state.peer.id)


def _edges(
    settings: GatewaySettings,
    backend: RingBackend,
    metrics: Metrics,
    usage: Usage,
    gate: Gate,
    lan_gate: Gate,
    door: MemberDoor,
    http_tls: EdgeTls | None,
    http: Callable[..., HttpServer],
) -> tuple[HttpServer, Server, Server, Callable[..., HttpServer]]:
    """The servers for clients, HTTP and gRPC, that for members, and what makes that of the LAN door. They
    share the answers that are kept for idempotency keys."""
    kept = KeptAnswers()

    def app(gate: Gate) -> ASGIApp:
        return create_app(
            backend, exposition=metrics.exposition, kept=kept, gate=gate, cors_origins=settings.cors_origins
        )

    def tell(asked: inference.GetUsageRequest) -> Awaitable[inference.GetUsageResponse]:
        return usage.tell(asked, chain(*(one.known.records.values() for one in (gate, lan_gate))))

    service = InferenceService(backend, metrics.exposition, tell, kept)

    def server(admit: Admit, port: Port) -> Server:
        services = [(inference_grpc.add_InferenceServicer_to_server, service, SERVICE)]
        return Server(services, port=port, interceptors=[GateInterceptor(admit)])

    return (
        http(app(gate), tls=http_tls),
        server(by_key(gate), INFERENCE),
        server(door.admit, MEMBERS),
        partial(http, app(lan_gate)),
    )


def _gates(settings: GatewaySettings, metrics: Metrics) -> tuple[Gate, Gate]:
    """The gate of the edges, and the LAN door's, which never opens without a key.

    Raises ConfigError (NO_KEYS, KEYS_CORRUPT, SECRET_FILE_UNSAFE).
    """
    limits, refused, folder = _limits(settings), _counting(metrics), settings.state_dir
    gate = Gate(KeyFile(folder), limits, on_refused=refused)
    lan_gate = Gate(KeyFile(folder / LAN_FOLDER), limits, required=True, on_refused=refused)
    if settings.listens_beyond_loopback and not gate.usable_keys:
        raise ConfigError(
            "other machines can connect to this gateway and there is no API key yet",
            hint="run sealring key create first, or listen on 127.0.0.1",
            reason="NO_KEYS",
        )
    return gate, lan_gate


def _counting(metrics: Metrics) -> Callable[[str], None]:
    return lambda reason: metrics.turned_away.labels(reason).inc()


def _limits(settings: GatewaySettings) -> Limits:
    return Limits(
        key_per_second=settings.key_requests_per_second,
        key_at_once=settings.key_requests_at_once,
        peer_per_second=settings.peer_requests_per_second,
    )


def _tls(certificate: Path | None, key: Path | None) -> EdgeTls | None:
    return EdgeTls(certificate, key) if certificate and key else None
