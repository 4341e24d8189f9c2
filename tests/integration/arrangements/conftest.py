import pytest_asyncio
from ringtest import MODEL, Arrangements, share_kernels

from sealring.cli.local.cluster import LocalCluster


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def arrangements(tmp_path_factory):
    """Three nodes with hybrid sealing keys, over which the demo model is spread in turn in several ways."""
    settings = {"node": {"hybrid_sealing_key": True}}
    folder = tmp_path_factory.mktemp("arrangements") / "state"
    async with LocalCluster(folder, MODEL, nodes=3, settings=settings) as cluster:
        share_kernels(cluster)
        await cluster.start()
        async with Arrangements(cluster) as arrangements:
            yield arrangements
