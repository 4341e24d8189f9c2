"""The OpenAI HTTP edge on the user's own machine: what it takes in clear leaves sealed."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sealring.client import AsyncClient, Ring
from sealring.client.sealing import SealingBackend
from sealring.gateway.http.app import create_app
from sealring.gateway.http.server import HttpServer
from sealring.gateway.metrics import Metrics
from sealring.mesh.system.processes import stop_on_signals

log = structlog.get_logger()


async def serve(client: AsyncClient, listen: str, *, say: Callable[[str], None]) -> None:
    """The proxy on a loopback address, until SIGTERM or SIGINT.

    `say` is told where it serves and who will see the prompts. Raises ConfigError (LOOPBACK_ONLY,
    CANNOT_LISTEN), and at the start RosterError or Unavailable without a roster that the root vouches for.
    """
    metrics = Metrics()
    edge = HttpServer(create_app(SealingBackend(client, metrics), exposition=metrics.exposition))
    with stop_on_signals() as stop:
        try:
            async with client:
                port = edge.listen(listen)
                rings = await client.rings()
                await edge.start()
                log.info(
                    "proxy_started", http_port=port, gateways=client.gateways.addresses, rings=len(rings)
                )
                host = listen.rpartition(":")[0]
                gateways = " or ".join(client.gateways.addresses)
                say(f"serving http://{host}:{port}/v1; {gateways} gets sealed prompts")
                for ring in rings:
                    say(_answered_by(ring))
                await stop.wait()
        finally:
            await edge.stop()
            log.info("proxy_stopped")


def _answered_by(ring: Ring) -> str:
    members = ", ".join(f"{one.id[:8]} ({one.level})" for one in ring.members)
    if ring.clear_links:
        return f"{ring.deployment} is not answered by ring {ring.id}, whose links are in clear: {members}"
    return f"{ring.deployment} is answered by ring {ring.id}, trust {ring.min_trust}: {members}"
