"""An evicted member or gateway is cut off within two seconds, also one that does not play along."""

import asyncio
import contextlib
import os
import signal
import socket
import time

import grpc
import psutil
import pytest
from ringtest import chat, serving

from sealring.v1 import admin_pb2, membership_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]

LIMIT_SECONDS = 2.0


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))]


def established(pids: list[int]) -> set[tuple[tuple, tuple]]:
    """The open connections of processes: own address and the other's."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_ESTABLISHED and one.family in (socket.AF_INET, socket.AF_INET6):
                    found.add((tuple(one.laddr), tuple(one.raddr)))
    return found


def between(ours: list[int], theirs: set[tuple]) -> set[tuple[tuple, tuple]]:
    """The open connections of some processes to any of the addresses."""
    return {(own, other) for own, other in established(ours) if other in theirs}


async def until(check, began: float, seconds: float = LIMIT_SECONDS) -> float:
    """How long after `began` it came to be."""
    while not check():
        assert time.monotonic() - began < seconds + 10, "never"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def generate(ring) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, AssertionError):
        await ring.ask(chat("Tell me a long story about the sea."), 400)


async def names(ring) -> dict[str, str]:
    answer = await ring.cluster.admin.call("ListNodes", admin_pb2.ListNodesRequest())
    return {node.name: node.id for node in answer.nodes}


async def evict(ring, identifier: str) -> float:
    """Evicts a member; when the roster without it was signed."""
    began = time.monotonic()
    await ring.cluster.admin.call("EvictNode", admin_pb2.EvictNodeRequest(id=identifier))
    return began


@pytest.mark.parametrize("frozen", [False, True], ids=["well-behaved", "frozen"])
async def test_an_evicted_member_is_cut_off_in_mid_generation(tmp_path, frozen):
    async with serving(tmp_path / "state", 3) as ring:
        pids = ring.cluster.processes
        asking = [asyncio.create_task(generate(ring)) for _ in range(3)]
        await asyncio.sleep(0.3)
        evicted = family(pids["node-1"])
        own = {address for address, _ in established(evicted)} | set(listening(evicted))
        # gRPC keeps a frozen peer's socket for a while, without any call on it: links are what counts there
        names_of_others = ("node-0", "node-2") if frozen else ("node-0", "node-2", "gateway")
        others = [pid for name in names_of_others for pid in family(pids[name])]
        assert between(others, own), "there are no connections to cut"
        identifier = (await names(ring))["node-1"]
        if frozen:
            os.kill(pids["node-1"], signal.SIGSTOP)
        try:
            began = await evict(ring, identifier)
            took = await until(lambda: not between(others, own), began)
            assert took < LIMIT_SECONDS
        finally:
            if frozen:
                os.kill(pids["node-1"], signal.SIGCONT)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: zombie(pids["node-1"]), began, 20)
        ended = ring.cluster._children._children["node-1"].process
        assert await ended.wait() == 0, "a supervisor would start it again"


async def test_an_evicted_gateway_is_cut_off(tmp_path):
    async with serving(tmp_path / "state", 2) as ring:
        pids = ring.cluster.processes
        asking = asyncio.create_task(generate(ring))
        await asyncio.sleep(0.3)
        gateway = family(pids["gateway"])
        own = {address for address, _ in established(gateway)}
        nodes = [pid for name in ("node-0", "node-1") for pid in family(pids[name])]
        assert between(nodes, own)
        answer = await ring.cluster.admin.call("GetRoster", admin_pb2.GetAdminRosterRequest())
        began = await evict(ring, gateway_of(answer))
        took = await until(lambda: not between(nodes, own), began)
        assert took < LIMIT_SECONDS
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        answer = await ring.cluster.admin.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
        phases = {one.phase for one in answer.deployments[0].rings}
        assert phases <= {membership_pb2.RING_PHASE_SERVING, membership_pb2.RING_PHASE_FORMING, 3}


def gateway_of(answer) -> str:
    from mesh.dsse import open_envelope
    from mesh.encoding import parse_json_object
    from mesh.roster_codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE

    opened = open_envelope(answer.roster, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    document = parse_json_object(opened.payload, max_bytes=MAX_PAYLOAD_BYTES)
    return document["gateways"][0]["id"]


def listening(pids: list[int]):
    for pid in pids:
        for one in psutil.Process(pid).net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                yield tuple(one.laddr)


def zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
