from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import macs_tools
import psutil
import pytest
import pytest_asyncio
from capture import paths_in
from closed import unprivileged
from expired import expire_all, found
from macs_tools import Tools
from ringtest import MODEL, Reply, Ring, chat, started
from slow_engine import markers

from sealring.cli.local.cluster import LocalCluster
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import expires_at
from sealring.mesh.system.addresses import free_port

SLOW_NODE = Path(__file__).parents[2] / "support" / "slow_node.py"
QUESTION = chat("What is the capital of France?")
MEMBERS = ("node-0", "node-1", "gateway")
UNHURRIED = {"replace_after": "24h"}
"""A node that a busy machine is long in starting is not replaced: the plan stays."""


class Before(NamedTuple):
    """What was seen of the cluster before it was off: its answer, its plan, the epoch in which it answered,
    whether its engines were slow, and who was enrolled."""

    answer: Reply
    plan: Any
    epoch: int
    slow: bool
    enrolments: list[str]


class Sick(NamedTuple):
    """A ring of two nodes with sick parts, the tools that they run, and an address for a standby."""

    ring: Ring
    tools: Tools
    standby: str
    before: Before


class DeadFirst(LocalCluster):
    """A cluster whose nodes advertise an address first at which nobody ever answers."""

    dead = ""

    def settings_of(self, name: str) -> dict[str, Any]:
        found = super().settings_of(name)
        return found | ({"advertise": [self.dead, self.address(name)]} if name in self.node_names else {})


async def made(state: Path) -> Before:
    """A cluster with slow engines, which is stopped again. One of its nodes has the model, the other gets its
    stage's part from there."""
    shutil.copytree(MODEL, state / "node-0" / "models" / "shared")
    settings = {"node": {"allow_downloads": True}, "coordinator": UNHURRIED}
    async with LocalCluster(state, "shared", nodes=2, settings=settings) as cluster:
        found(cluster)
        cluster.children.command = (sys.executable, str(SLOW_NODE))
        async with started(cluster, stages=2) as ring:
            answer = await ring.ask(QUESTION, 20)
            epoch = (await ring.status()).epoch
        pids = cluster.processes.values()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    slow = all(marker.exists() for marker in markers(state / "tmp"))
    return Before(answer, ring.deployment.plan, epoch, slow, enrolments_of(state))


def ends(state: Path) -> list[float]:
    """When the certificates of nodes and gateway end."""
    folders = [state / name for name in MEMBERS]
    return [expires_at(load_machine_state(folder).tls.certificate) for folder in folders]


def enrolments_of(state: Path) -> list[str]:
    return [path.read_text() for path in sorted(paths_in(state)) if path.name == "member.json"]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sick]:
    """A cluster that was off until nothing that it had signed was valid. Now its nodes' first folder of
    models may not be entered, and their first address is dead. They are challenged all the time."""
    folder = tmp_path_factory.mktemp("sick")
    tools, state = Tools(folder / "tools"), folder / "state"
    before = await made(state)
    expire_all(state / "coordinator", [state / name for name in MEMBERS])
    assert max(ends(state)) < time.time()
    key, _ = KeyFile(state / "gateway").create([Scope.INFERENCE])
    closed = folder / "home" / "models"
    closed.mkdir(parents=True)
    (folder / "home").chmod(0)
    standby = f"127.0.0.1:{free_port()}"
    coordinator = {"challenge_interval": 1.0, "challenge_timeout": 30.0, "standby": standby}
    settings = {"node": {"models": [str(closed)]}, "coordinator": UNHURRIED | coordinator}
    with socket.create_server(("127.0.0.1", 0)) as dead:
        cluster = DeadFirst(state, "shared", nodes=2, settings=settings)
        cluster.dead = f"127.0.0.1:{dead.getsockname()[1]}"
        async with cluster:
            cluster.children.command = (
                *unprivileged(),
                *(sys.executable, macs_tools.__file__, str(tools.root)),
            )
            async with started(cluster) as ring:
                ring.key = key
                yield Sick(ring, tools, standby, before)
