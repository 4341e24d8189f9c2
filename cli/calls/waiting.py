"""Waiting for nodes, rings and gateways, with words for what they are doing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sealring.cli.terminal.output import plain
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition, NotFound
from sealring.mesh.system.pace import Reached

if TYPE_CHECKING:
    from sealring.cli.calls.gateway import GatewayCalls
    from sealring.cli.calls.operator import Admin

_POLL_SECONDS = 0.15
_START_POLL_SECONDS = 0.2
"""A shorter pause would take processor time from the components that are starting."""

_MAX_FAILURES = 4
APIS_OWN = "HTTP requests that name no temperature have the model's own, or 1; sealring chat has 0"
"""Is said where `own_sampling` finds none: plans of early releases do not name what a model has."""


async def find_deployment(admin: Admin, name: str) -> Any:
    """The deployment of that name. Raises NotFound (DEPLOYMENT_NOT_FOUND)."""
    answer = await admin.call("ListDeployments")
    for one in answer.deployments:
        if one.plan.spec.name == name:
            return one
    raise NotFound(
        f"there is no deployment {name[:128]}",
        hint="see: sealring deployment list",
        reason="DEPLOYMENT_NOT_FOUND",
    )


def own_sampling(card: Any) -> str:
    """The model's own options of sampling, which HTTP requests have that do not name them; empty: none."""
    from sealring.mesh.prompt.options import own_of

    told = ", ".join(f"{name} {value:g}" for name, value in own_of(card).items())
    return told and f"HTTP requests that set no sampling have {told}, as the model's makers say"


async def wait_until_serving(
    admin: Admin, name: str, *, seconds: float, say: Callable[[str], None] = lambda text: None
) -> Any:
    """The deployment once all its rings serve.

    Raises FailedPrecondition (RING_FAILS) when one epoch after the other ends for the same reason,
    DeadlineExceeded (RING_NOT_SERVING), NotFound.
    """
    from sealring.v1 import membership_pb2

    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    failures: dict[tuple[str, str], set[int]] = {}
    while True:
        found = await find_deployment(admin, name)
        rings = found.rings
        if rings and all(ring.phase == membership_pb2.RING_PHASE_SERVING for ring in rings):
            return found
        for ring in rings:
            _count_failure(name, ring, failures)
        if loop.time() > deadline:
            reasons = sorted({ring.reason for ring in rings if ring.reason})
            raise DeadlineExceeded(
                f"{name} was not serving after {seconds:g} s{': ' if reasons else ''}{'; '.join(reasons)}",
                hint="see sealring deployment list and the nodes' logs",
                reason="RING_NOT_SERVING",
            )
        say(describe(name, rings))
        await asyncio.sleep(_POLL_SECONDS)


def _count_failure(name: str, ring: Any, failures: dict[tuple[str, str], set[int]]) -> None:
    from sealring.v1 import membership_pb2

    if ring.phase != membership_pb2.RING_PHASE_DOWN or not ring.reason or not ring.epoch:
        return
    epochs = failures.setdefault((ring.ring, ring.reason), set())
    epochs.add(ring.epoch)
    if len(epochs) >= _MAX_FAILURES:
        raise FailedPrecondition(
            f"{name} does not come up: {ring.reason}",
            hint="the coordinator goes on trying; see the nodes' logs, or delete the deployment",
            reason="RING_FAILS",
        )


def describe(name: str, rings: Any) -> str:
    """What the rings are doing, for example "demo: loading 60 % (slowest of 3 nodes)"."""
    from sealring.v1 import membership_pb2

    for ring in rings:
        if ring.phase == membership_pb2.RING_PHASE_SERVING:
            continue
        if ring.HasField("slowest"):
            others = len(ring.progress)
            place = f" ({ring.slowest.member}, the slowest of {others})" if others > 1 else ""
            return f"{name}: {progressed(plain(ring.slowest))}{place}"
        if ring.reason and ring.phase == membership_pb2.RING_PHASE_DOWN:
            return f"{name}: waiting, {ring.reason}"
    return f"{name}: forming the ring"


def progressed(one: Mapping[str, Any]) -> str:
    """How far a ring is that forms, by the data of its slowest member: the share of all members' work, and
    what this member does."""
    figures = (one.get(name, 0) for name in ("done", "total", "rate", "seconds_left"))
    words, fraction = Reached(one["what"], *figures).words, one.get("fraction", 0.0)
    return f"{math.floor(100 * fraction)} %, {words}" if fraction else words


async def wait_until_online(
    admin: Admin, wanted: Mapping[str, str], *, seconds: float, hint: str, say: Callable[[str], None]
) -> None:
    """Returns once all nodes of `wanted` (id to name) are online.

    Raises DeadlineExceeded (NODES_NOT_ONLINE) with `hint`.
    """
    from sealring.v1 import admin_pb2

    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        answer = await admin.call("ListNodes")
        online = {one.id for one in answer.nodes if one.state == admin_pb2.NODE_STATE_ONLINE}
        late = sorted(name for member, name in wanted.items() if member not in online)
        if not late:
            return
        say(f"{len(wanted) - len(late)} of {len(wanted)} nodes are online")
        if loop.time() > deadline:
            raise DeadlineExceeded(
                f"not online after {seconds:g} s: {', '.join(late)}", hint=hint, reason="NODES_NOT_ONLINE"
            )
        await asyncio.sleep(_START_POLL_SECONDS)


async def wait_until_offered(gateway: GatewayCalls, name: str, *, seconds: float, hint: str) -> None:
    """Returns once the gateway offers the model `name` with a ring, or asks for a key, which this lacks.

    Raises DeadlineExceeded (GATEWAY_NOT_READY) with `hint`.
    """
    import grpc

    from sealring.v1 import inference_pb2

    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while loop.time() < deadline:
        try:
            request = inference_pb2.ListModelsRequest()
            answer = await gateway.stub.ListModels(request, timeout=5, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return
            answer = inference_pb2.ListModelsResponse()
        if any(one.name == name and one.rings for one in answer.models):
            return
        await asyncio.sleep(_START_POLL_SECONDS)
    raise DeadlineExceeded(
        f"the gateway did not offer {name} within {seconds:g} s", hint=hint, reason="GATEWAY_NOT_READY"
    )
