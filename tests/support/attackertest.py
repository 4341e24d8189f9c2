"""The attacker process of tests/trust, and what it needs to know of a cluster."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ringtest import LIMIT_SECONDS, Ring, chat

from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import PeerIdentity, Role, role_server_name

ATTACKER = Path(__file__).parents[1] / "trust" / "attacker.py"


@asynccontextmanager
async def attacker(mode: str, **arguments: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ATTACKER),
        mode,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    await process.stdin.drain()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def lines(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    assert process.stdout is not None
    while True:
        async with asyncio.timeout(LIMIT_SECONDS):
            line = await process.stdout.readline()
        if not line:
            return
        yield json.loads(line)


_callers: list[asyncio.subprocess.Process] = []


@asynccontextmanager
async def calling() -> AsyncIterator[None]:
    """Has the process that `attack_with` calls with, one for all attacks."""
    async with attacker("calls") as process:
        _callers.append(process)
        try:
            yield
        finally:
            _callers.pop()


async def told(**arguments: Any) -> list[dict[str, Any]]:
    process = _callers[-1]
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    await process.stdin.drain()
    found = []
    async for line in lines(process):
        if "done" in line:
            return found
        found.append(line)
    raise AssertionError("the attacker ended")


async def nodes(ring: Ring) -> dict[str, Any]:
    answer = await ring.cluster.admin.call("ListNodes")
    return {node.name: node for node in answer.nodes}


async def replaced(ring: Ring, name: str) -> None:
    """Enrols and starts a node or the gateway anew, in the place of one that was thrown out."""
    cluster = ring.cluster
    shutil.rmtree(cluster.state_dir / name)
    await cluster.enrol(name)
    await cluster.start_one(name)
    if name != "gateway":
        await cluster.wait_for_nodes()


async def targets(ring: Ring) -> list[dict[str, str]]:
    """Every port that asks for a certificate, with the name that its holder proves."""
    cluster = ring.cluster
    coordinator = role_server_name(Role.COORDINATOR)
    found = [{"address": cluster.address(name), "name": coordinator} for name in ("coordinator", "join")]
    state = load_machine_state(cluster.operator_bundle)
    for name, node in (await nodes(ring)).items():
        peer = PeerIdentity(state.peer.cluster, Role.MEMBER, node.id)
        found.append({"address": cluster.address(name), "name": peer.server_name})
    return found


async def attack_with(ring: Ring, state: Path, **options: Any) -> list[dict[str, Any]]:
    now = await ring.status()
    return await told(
        **options,
        state=str(state),
        authorities=str(ring.cluster.operator_bundle.parent / "ca.pem"),
        targets=await targets(ring),
        cluster=load_machine_state(ring.cluster.operator_bundle).peer.cluster,
        ring=now.ring,
        epoch=now.epoch,
    )


async def serves_on(ring: Ring, epoch: int) -> None:
    assert (await ring.ask(chat("What is the capital of France?"), 20)).completion_tokens > 0
    assert (await ring.status()).epoch == epoch
