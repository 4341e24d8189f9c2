from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attackertest import calling
from ringtest import HASTY, MODEL, Ring, started

from sealring.cli.local.cluster import LocalCluster

FLOODING = Path(__file__).parents[1] / "flooding_node.py"


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def victim(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    """A ring of two that serves, and one node more. Its head floods the gateway as long as the
    file `flood` names an attack.

    glibc gives large blocks back here once they are free, as macOS does. By itself it keeps some of them, and
    memory is counted."""
    folder = tmp_path_factory.mktemp("victim")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
        made = LocalCluster(folder / "state", MODEL, nodes=3, name="demo", settings=HASTY)
    async with made as cluster:
        cluster.children.command = (sys.executable, str(FLOODING), str(folder / "flood"))
        (folder / "flood").touch()
        async with calling(), started(cluster, stages=2) as ring:
            yield ring


@pytest.fixture
def flood(victim: Ring) -> Path:
    """The file that names the attack of the ring's head, or is empty."""
    return victim.cluster.state_dir.parent / "flood"
