from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import macs_tools
import pytest
import pytest_asyncio
from closed import unprivileged
from macs_tools import Tools
from ringtest import MODEL, Ring, started

from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.system.addresses import free_port


class Sick(NamedTuple):
    """A ring of two nodes with sick parts, the tools that they run, and an address for a standby."""

    ring: Ring
    tools: Tools
    standby: str


class DeadFirst(LocalCluster):
    """A cluster whose nodes advertise an address first at which nobody ever answers."""

    dead = ""

    def settings_of(self, name: str) -> dict[str, Any]:
        found = super().settings_of(name)
        return found | ({"advertise": [self.dead, self.address(name)]} if name in self.node_names else {})


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sick]:
    """The nodes' first models folder may not be entered, and their first address is dead. They are challenged
    all the time."""
    folder = tmp_path_factory.mktemp("sick")
    tools = Tools(folder / "tools")
    closed, models = folder / "home" / "models", folder / "models"
    closed.mkdir(parents=True)
    shutil.copytree(MODEL, models / "shared")
    (folder / "home").chmod(0)
    standby = f"127.0.0.1:{free_port()}"
    coordinator = {"challenge_interval": 1.0, "challenge_timeout": 30.0, "replace_after": "24h"}
    settings = {
        "node": {"models": [str(closed), str(models)]},
        "coordinator": coordinator | {"standby": standby},
    }
    with socket.create_server(("127.0.0.1", 0)) as dead:
        cluster = DeadFirst(folder / "state", "shared", nodes=2, settings=settings)
        cluster.dead = f"127.0.0.1:{dead.getsockname()[1]}"
        async with cluster:
            cluster.children.command = (
                *unprivileged(),
                *(sys.executable, macs_tools.__file__, str(tools.root)),
            )
            async with started(cluster, stages=2) as ring:
                yield Sick(ring, tools, standby)
