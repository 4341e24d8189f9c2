import pytest
import pytest_asyncio
from ringtest import Arrangements, serving

from sealring.gateway.access.keyfile import KeyFile
from sealring.gateway.access.keys import Scope


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def rings(tmp_path_factory):
    """Two rings of one node each behind a gateway that asks for keys, and one node to spare."""
    folder = tmp_path_factory.mktemp("routing") / "state"
    async with serving(folder, 3, stages=1, replicas=2) as ring:
        ring.key = KeyFile(folder / "gateway").create([Scope.INFERENCE, Scope.READ])[0]
        await ring.offered(2)
        yield ring


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def spare(rings):
    """What the spare node serves."""
    async with Arrangements(rings.cluster, key=rings.key) as arrangements:
        yield arrangements


@pytest.fixture
def other_key(rings):
    """The key of somebody else."""
    return KeyFile(rings.cluster.state_dir / "gateway").create([Scope.INFERENCE])[0]
