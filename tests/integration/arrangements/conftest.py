import sys

import hasty
import pytest
import pytest_asyncio
from kernels import share_kernels
from ringtest import HASTY, MODEL, Arrangements

from sealring.cli.local.cluster import LocalCluster
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def arrangements(tmp_path_factory):
    """Three nodes with hybrid sealing keys, over which the demo model is spread in turn in several ways,
    behind a gateway that asks for keys."""
    settings = HASTY | {"node": {"hybrid_sealing_key": True}}
    folder = tmp_path_factory.mktemp("arrangements") / "state"
    async with LocalCluster(folder, MODEL, nodes=3, settings=settings) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        share_kernels(folder)
        await cluster.start()
        key, _ = KeyFile(folder / "gateway").create([Scope.INFERENCE, Scope.READ])
        async with Arrangements(cluster, key=key) as arrangements:
            yield arrangements


@pytest_asyncio.fixture(loop_scope="session")
async def rings(arrangements):
    """Two rings of one node each, and one node to spare."""
    return await arrangements.have(stages=1, replicas=2)


@pytest.fixture
def other_key(arrangements):
    """The key of somebody else."""
    return KeyFile(arrangements.cluster.state_dir / "gateway").create([Scope.INFERENCE])[0]
