import pytest
import pytest_asyncio
from answering import ask_all
from harness import PREFILL_CHUNK, Place
from ringtest import serving

SPEC = {"stages": 3, "prefill_chunk": PREFILL_CHUNK}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def ring(tmp_path_factory):
    async with serving(tmp_path_factory.mktemp("faults") / "state", 3, **SPEC) as ring:
        yield ring


@pytest_asyncio.fixture(loop_scope="session")
async def broken(ring):
    """A ring of three whose parts are killed and frozen; begin with `await broken.serving()`. It is made anew
    if a test before had it moved to fewer nodes."""
    answer = await ring.cluster.admin.call("ListDeployments")
    if len(answer.deployments[0].plan.rings[0].stages) < SPEC["stages"]:
        await ring.cluster.admin.call("DeleteDeployment", name=ring.model)
        await ring.cluster.deploy(**SPEC)
    return ring


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sealing(ring):
    async with ring.sealing() as client:
        yield client


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_place(ring, sealing):
    await ring.serving()
    return Place(ring, sealing, await ask_all(ring, sealing))


@pytest.fixture
def place(broken, shared_place):
    """The ring with the answers that it gives while nothing happens."""
    return shared_place
