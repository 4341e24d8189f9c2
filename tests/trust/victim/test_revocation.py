"""An evicted member or gateway is cut off in mid-generation, also one that does not play along."""

import asyncio
import contextlib
import json
import signal
import socket

import grpc
import psutil
from attackertest import replaced
from patience import until
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, chat

from sealring.mesh.rpc import from_rpc_error

pytestmark = CLUSTER
END = [json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]]
"""The tokens that end an answer."""


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


@contextlib.asynccontextmanager
async def generating(ring):
    """While three requests without an end are there, one at least being answered.

    They would go on in the ring's next epoch: they are given up instead.
    """
    endless = chat("Tell me a long story about the sea.", logit_bias=dict.fromkeys(END, -100.0))
    asking = [asyncio.create_task(ring.ask(endless, 900)) for _ in range(3)]
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await ring.counted("num_requests_running"):
                await asyncio.sleep(0.02)
        yield
    finally:
        for one in asking:
            one.cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
    for ended in answers:
        if not isinstance(ended, asyncio.CancelledError):
            assert isinstance(ended, grpc.aio.AioRpcError)
            assert from_rpc_error(ended).reason == "RING_GONE"


async def evict(ring, identifier: str) -> None:
    await ring.cluster.admin.call("EvictNode", id=identifier)


async def members(ring) -> list[tuple[str, str]]:
    """Name and id of the ring's members, by rank."""
    answer = await ring.cluster.admin.call("ListNodes")
    members = [(ring.rank, node.name, node.id) for node in answer.nodes for ring in node.rings]
    return [(name, id) for _, name, id in sorted(members)]


async def test_an_evicted_member_is_cut_off(victim):
    """And one that is frozen: a spare takes its place."""
    for frozen in (False, True):
        await replaced(victim, await evicted_member(victim, frozen))
        await victim.serving()


async def evicted_member(ring, frozen: bool) -> str:
    pids = ring.cluster.processes
    (head, _), (name, identifier) = await members(ring)
    async with generating(ring):
        evicted = family(pids[name])
        own = {address for address, _ in established(evicted)} | set(listening(evicted))
        # gRPC keeps a frozen peer's socket for a while, without any call on it: links are what counts there
        others = [pid for other in ((head,) if frozen else (head, "gateway")) for pid in family(pids[other])]
        assert between(others, own), "there are no connections to cut"
        daemon = psutil.Process(pids[name])
        if frozen:
            daemon.send_signal(signal.SIGSTOP)
        try:
            await evict(ring, identifier)
            await until(lambda: not between(others, own))
        finally:
            if frozen:
                daemon.send_signal(signal.SIGCONT)
    await ends(ring, name)
    return name


async def test_an_evicted_gateway_is_cut_off(victim):
    ring, pids = victim, victim.cluster.processes
    async with generating(ring):
        gateway = family(pids["gateway"])
        own = {address for address, _ in established(gateway)}
        nodes = [pid for name, _ in await members(ring) for pid in family(pids[name])]
        assert between(nodes, own)
        answer = await ring.cluster.admin.call("GetRoster")
        await evict(ring, gateway_of(answer))
        await until(lambda: not between(nodes, own))
    await ends(ring, "gateway")
    await replaced(ring, "gateway")
    await ring.serving()


async def ends(ring, name: str) -> None:
    ended = ring.cluster.children.child(name).process
    async with asyncio.timeout(LIMIT_SECONDS):
        assert await ended.wait() == 0, "a supervisor would start it again"


def gateway_of(answer) -> str:
    from sealring.mesh.crypto import parse_envelope, parse_json_object
    from sealring.mesh.roster import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE

    opened = parse_envelope(answer.roster, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    document = parse_json_object(opened.payload, max_bytes=MAX_PAYLOAD_BYTES)
    return document["gateways"][0]["id"]


def listening(pids: list[int]):
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    yield tuple(one.laddr)
