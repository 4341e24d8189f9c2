"""The models that nodes have: shown as a matrix, and changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from sealring.cli.calls.members import find_node
from sealring.cli.calls.operator import Admin
from sealring.cli.terminal.output import print_data, print_table, say
from sealring.mesh.errors import FailedPrecondition, NotFound, Unavailable
from sealring.mesh.system.pace import Reached, together
from sealring.mesh.units import size

_POLL_SECONDS = 0.5
_ASKING = "asking which nodes have it"
_STALE_SECONDS = 5.0
"""The time for which a node may still report the result of an earlier fetch after a new one has begun."""


def print_models(nodes: list[dict[str, Any]]) -> None:
    """Models by nodes; below it, what keeps models from coming."""
    held = {node["name"]: {one["name"]: one for one in node["heartbeat"]["models"]} for node in nodes}
    names = sorted({name for models in held.values() for name in models})
    if not names:
        say("no node has a model in its folders; what is served from elsewhere: sealring deployment list")
        return
    rows = []
    for name in names:
        largest = max(models[name]["size"] for models in held.values() if name in models)
        rows.append([name, size(largest), *(_cell(models.get(name)) for models in held.values())])
    print_table(["model", "size", *held], rows)
    for node, models in held.items():
        for one in models.values():
            if one["problem"]:
                print_data(f"{node} does not get {one['name']}: {one['problem']}")
                print_data(f"to give it up: sealring model remove {one['name']} --node {node}")


async def pull(
    admin: Admin,
    model: str,
    nodes: Sequence[str],
    tell: Callable[[str], None],
    *,
    wait: bool = True,
    to_plan: bool = False,
    alone: bool = True,
) -> list[str]:
    """Has nodes fetch a model, and waits until it is there; their names.

    With `to_plan` it is all but the weights, of which only the headers come. Unless it comes `alone`,
    it says no share, as more is to come that has shares. Without `nodes` it is one that is online: one
    with a part of it, else that with the most memory.

    Raises NotFound (UNKNOWN_NODE: also of one that leaves meanwhile), Unavailable (NO_NODE_ONLINE),
    FailedPrecondition (MODEL_NOT_FETCHED).
    """
    from sealring.v1 import membership_pb2

    ids = [await find_node(admin, node) for node in nodes] or [await _best(admin, model)]
    for one in ids:
        await admin.call("PullModel", id=one, model=model, to_plan=to_plan)
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        known = {node.id: node for node in (await admin.call("ListNodes")).nodes if node.id in ids}
        if len(known) < len(set(ids)):  # evicted meanwhile
            raise NotFound(
                f"a node that fetched {model} has left the cluster",
                hint="see: sealring node list",
                reason="UNKNOWN_NODE",
            )
        found = {one: [held for held in known[one].heartbeat.models if held.name == model] for one in known}
        for one, there in found.items():
            for held in there:
                if held.problem and loop.time() > started + _STALE_SECONDS:
                    why, _, hint = held.problem.partition(" (hint: ")
                    again = f"sealring model pull {model} --node {known[one].name}"
                    first = f"{hint.removesuffix(')')}; then" if hint else "once that is mended"
                    raise FailedPrecondition(
                        f"{known[one].name} does not get {model}: {why}",
                        hint=f"{first}: {again}",
                        reason="MODEL_NOT_FETCHED",
                    )
        names = [known[one].name for one in known]
        if not wait or all(any(_is_there(held, to_plan) for held in there) for there in found.values()):
            return names
        reached = together(
            [
                Reached("", one.done, one.size, one.rate, one.seconds_left)
                for there in found.values()
                for one in there or [membership_pb2.HeldModel()]
            ]
        )
        share = f"{math.floor(100 * reached.share)} %, " if reached.total and alone and not to_plan else ""
        tell(f"fetching {model} to {', '.join(names)}: {share}{reached.figures or _ASKING}")
        await asyncio.sleep(_POLL_SECONDS)


def _is_there(held: Any, to_plan: bool) -> bool:
    return bool(held.fetched if to_plan else held.done == held.size > 0)


async def lies_in_parts(admin: Admin, model: str) -> bool:
    """Whether nodes have fetched parts of a model, and none has all of it."""
    held = (await _held(admin, model)).values()
    return any(one.fetched for one in held) and not any(_is_there(one, False) for one in held)


async def lacks_parts(admin: Admin, plan: Any) -> bool:
    """Whether a node of the plan lacks a part of the model or of its adapter, or a head a part of the draft
    model, where nodes have these in their models folders.

    What lies elsewhere, as in the Hugging Face cache or at a path, they do not list."""
    stages = [stage for ring in plan.rings for stage in ring.stages]
    needed = {plan.spec.model: stages}
    for stage in stages:
        for resident in stage.residents:
            if resident.model:
                needed.setdefault(resident.model, []).append(stage)
    if plan.spec.adapter:
        needed[plan.spec.adapter] = stages
    for model, having in needed.items():
        held = await _held(admin, model)
        if held and not all(one.member in held and _is_there(held[one.member], False) for one in having):
            return True
    return False


async def _held(admin: Admin, model: str) -> dict[str, Any]:
    """The nodes that list a model: node id to the entry in its list."""
    nodes = (await admin.call("ListNodes")).nodes
    return {node.id: held for node in nodes for held in node.heartbeat.models if held.name == model}


async def remove(admin: Admin, model: str, nodes: Sequence[str]) -> list[str]:
    """Has nodes delete a model; without `nodes` all that have fetched it, or fetch it. Their names.

    Raises NotFound (MODEL_NOT_FOUND), and what a node refuses it with.
    """
    ids = [await find_node(admin, node) for node in nodes]
    known = (await admin.call("ListNodes")).nodes
    if not ids:
        ids = [
            node.id
            for node in known
            for held in node.heartbeat.models
            if held.name == model and (held.fetched or held.done < held.size or held.problem)
        ]
    if not ids:
        raise NotFound(
            f"no node has fetched {model}",
            hint="see: sealring model list; folders that their owner put there stay",
            reason="MODEL_NOT_FOUND",
        )
    for one in ids:
        await admin.call("RemoveModel", id=one, model=model)
    return [node.name for node in known if node.id in ids]


async def _best(admin: Admin, model: str) -> str:
    from sealring.v1 import admin_pb2

    online = [
        node for node in (await admin.call("ListNodes")).nodes if node.state == admin_pb2.NODE_STATE_ONLINE
    ]
    if not online:
        raise Unavailable("no node is online", hint="see: sealring status", reason="NO_NODE_ONLINE")
    done = {
        node.id: sum(held.done for held in node.heartbeat.models if held.name == model) for node in online
    }
    return str(max(online, key=lambda node: (done[node.id], node.heartbeat.memory_usable)).id)


def _cell(held: dict[str, Any] | None) -> str:
    if held is None:
        return ""
    if held["problem"]:
        return "failed"
    if not held["size"]:
        return "waits"
    if held["done"] == held["size"]:
        return "whole"
    return f"{'part, ' if held['fetched'] else ''}{held['done'] / held['size']:.0%}"
