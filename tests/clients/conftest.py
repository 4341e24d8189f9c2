from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from httpedge import backend, calling, port
from scriptedring import Served, all_scenes, serving_script

__all__ = ["backend", "calling", "port", "served"]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A ring with the scripted model, which no test breaks."""
    folder = tmp_path_factory.mktemp("p")
    async with serving_script(folder, all_scenes(folder / "w")) as served:
        yield served
