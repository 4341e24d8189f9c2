import sys

import hasty
import pytest
import pytest_asyncio
from kernels import share_kernels
from realmodels import Whole
from ringtest import HASTY, MODEL, Arrangements

from sealring.cli.local.cluster import LocalCluster


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def arrangements(tmp_path_factory):
    """Three nodes, which serve one model after the other."""
    folder = tmp_path_factory.mktemp("real") / "state"
    async with LocalCluster(folder, MODEL, nodes=3, settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        share_kernels(folder)
        await cluster.start()
        async with Arrangements(cluster) as arrangements:
            yield arrangements


@pytest.fixture(scope="package")
def wholes():
    """The whole models, each loaded once."""
    loaded = {}

    def find(name):
        if name not in loaded:
            loaded.clear()  # of their memory one is enough
            loaded[name] = Whole(name)
        return loaded[name]

    return find
