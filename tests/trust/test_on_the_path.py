"""Somebody on the path, a stranger at a ring port, and a port scan, against a serving cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from onpath import ATTACKS, Proxy
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, Reply, Ring, chat, started

from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.system.addresses import parse_address
from sealring.v1 import membership_pb2

pytestmark = CLUSTER
HERE = Path(__file__).parent
QUESTION = "What is the capital of France?"
TOKENS = 16
EVERY_RUN = {"alter", "replay", "swallow", "delay"}
"""To a ring the other attacks are one more record that does not open; `make sweep` has them, and
`tests/node/link/test_records.py` tells them apart in every run."""


class Switchboard:
    """Hands out a proxy for every ring address that a node asks about.

    `stranger` is the greeting of somebody that connects to the next proxy before the node can; `answered` has
    the number of bytes that it got until its connection was closed.
    """

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self.stranger: bytes | None = None
        self.answered: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking, _ = self._server.accept()
                with asking:
                    address = asking.makefile().readline().strip()
                    asking.sendall(self._way_to(address).encode() + b"\n")

    def _way_to(self, address: str) -> str:
        target = parse_address(address)
        if self.stranger is not None:
            guest, said, self.stranger = socket.create_connection(target), self.stranger, None
            threading.Thread(target=self._hear, args=(guest, said), daemon=True).start()
        self.proxies.append(Proxy(target))
        return self.proxies[-1].address

    def _hear(self, guest: socket.socket, said: bytes) -> None:
        got = 0
        with guest, contextlib.suppress(OSError):
            guest.sendall(said)
            while part := guest.recv(4096):
                got += len(part)
        self.answered.put(got)

    def close(self) -> None:
        self._server.close()
        for proxy in self.proxies:
            proxy.close()


class TappedCluster(LocalCluster):
    """A cluster whose ring connections and daemon ports are reached over an attacker's proxies only."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir, MODEL, nodes=2, name="demo")
        self.ring_path = Switchboard()
        self.daemons: dict[str, Proxy] = {}

    def settings_of(self, name: str) -> dict[str, Any]:
        settings = super().settings_of(name)
        if name in self.node_names:
            if name not in self.daemons:
                self.daemons[name] = Proxy(parse_address(settings["listen"]))
            settings["advertise"] = [self.daemons[name].address]
        return settings

    async def __aenter__(self) -> TappedCluster:
        await super().__aenter__()
        self.children.command = (sys.executable, str(HERE / "onpath_node.py"), str(self.ring_path.port))
        return self

    def close(self) -> None:
        self.ring_path.close()
        for proxy in self.daemons.values():
            proxy.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tapped(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    async with (
        TappedCluster(tmp_path_factory.mktemp("tapped") / "state") as cluster,
        started(cluster, stages=2) as ring,
    ):
        yield ring
        cluster.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(tapped: Ring) -> Reply:
    """What is answered while nobody attacks."""
    return await tapped.reply(chat(QUESTION), TOKENS)


async def attacked(ring: Ring, proxy: Proxy, attack: str, expected: Reply) -> None:
    """One attack while a reply is under way: the reply is the right one, for one epoch at most."""
    before = (await ring.serving()).epoch
    proxy.arm(ATTACKS[attack])
    answer = asyncio.create_task(ring.reply(chat(QUESTION), TOKENS))
    assert await asyncio.to_thread(proxy.used.wait, LIMIT_SECONDS), "nothing came along the path"
    if attack != "delay":
        await over(ring, before)
    assert await answer == expected
    assert await ring.reply(chat(QUESTION), TOKENS) == expected
    after = (await ring.serving()).epoch
    assert after - before <= (0 if attack == "delay" else 1)
    assert after > before or attack == "delay", "what was altered was not noticed"


def served(ring: Ring, epoch: int) -> bool:
    """Whether an epoch has formed, by the coordinator's log; a busy machine may have ended it since."""
    lines = ring.cluster.logs["coordinator"].read_text().splitlines()
    changes = [json.loads(line) for line in lines if '"ring_changed"' in line]
    return (epoch, "serving") in {(one["epoch"], one["phase"]) for one in changes}


async def over(ring: Ring, epoch: int) -> None:
    """Returns when an epoch is over."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            now = await ring.status()
            if now.epoch != epoch or now.phase != membership_pb2.RING_PHASE_SERVING:
                return
            await asyncio.sleep(0.1)


def attacks(names: Iterable[str], every_run: Iterable[str]) -> list[Any]:
    """Each costs an epoch; those that are not for every run are marked as a sweep."""
    return [pytest.param(name, marks=[pytest.mark.sweep] * (name not in every_run)) for name in names]


@pytest.mark.parametrize("attack", attacks(ATTACKS, EVERY_RUN))
async def test_the_ring_path(tapped: Ring, expected: Reply, attack: str) -> None:
    """Between the carriers: MLX's own TCP connections, sealed records and nothing else."""
    newest = len(tapped.cluster.ring_path.proxies) and tapped.cluster.ring_path.proxies[-1]
    assert newest, "the ring does not lead over the attacker"
    await attacked(tapped, newest, attack, expected)


@pytest.mark.parametrize("attack", attacks(["alter", "truncate", "swallow", "delay"], ["alter", "delay"]))
async def test_a_daemons_port(tapped: Ring, expected: Reply, attack: str) -> None:
    """Between gateway and member, and between members: TLS, with handshakes and control inside."""
    await attacked(tapped, tapped.cluster.daemons["node-1"], attack, expected)


@pytest.mark.parametrize("attack", attacks(["alter", "truncate", "swallow"], ["alter", "swallow"]))
async def test_while_the_ring_forms(tapped: Ring, expected: Reply, attack: str) -> None:
    """The handshakes of an epoch are what is attacked: they are repeated, and the epoch is formed."""
    before = (await tapped.serving()).epoch
    _carrier(tapped).kill()
    tapped.cluster.daemons["node-1"].arm(ATTACKS[attack])
    assert await tapped.reply(chat(QUESTION), TOKENS) == expected
    assert served(tapped, before + 1)


@pytest.mark.parametrize("send", [0, pytest.param(48, marks=pytest.mark.sweep)])
async def test_a_stranger_that_connects_first(tapped: Ring, expected: Reply, send: int) -> None:
    """It sits at the port before the neighbour does, silent or not: the epoch is formed without it."""
    before = (await tapped.serving()).epoch
    path = tapped.cluster.ring_path
    path.stranger = os.urandom(send)
    _carrier(tapped).kill()
    assert await asyncio.to_thread(path.answered.get, timeout=LIMIT_SECONDS) == 0
    assert await tapped.reply(chat(QUESTION), TOKENS) == expected
    assert served(tapped, before + 1)


async def test_a_port_scan(tapped: Ring, expected: Reply) -> None:
    """Garbage, slow bytes and half handshakes at every port of every process: streams go on."""
    before = (await tapped.serving()).epoch
    process = await begun("scan", rounds=15, ports=_ports(tapped))
    replies = [await tapped.ask(chat(QUESTION), TOKENS)]
    while process.returncode is None:
        replies.append(await tapped.ask(chat(QUESTION), TOKENS))
        await asyncio.sleep(0.05)
    assert json.loads((await process.communicate())[0])["made"] > 60
    assert set(replies) == {expected}
    assert (await tapped.serving()).epoch == before


async def begun(mode: str, **arguments: Any) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "attacker.py"),
        mode,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=HERE.parents[1],
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    await process.stdin.drain()
    return process


def _family(ring: Ring) -> list[psutil.Process]:
    parents = [psutil.Process(pid) for pid in ring.cluster.processes.values()]
    return [*parents, *(child for parent in parents for child in parent.children(recursive=True))]


def _carrier(ring: Ring) -> psutil.Process:
    return next(one for name in ring.cluster.node_names for one in ring.parts(name, "carrier.main"))


def _ports(ring: Ring) -> list[int]:
    own = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    found = {own}
    for process in _family(ring):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections("tcp")
            found |= {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    return sorted(found)
