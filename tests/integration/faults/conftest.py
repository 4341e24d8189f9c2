import pytest_asyncio
from answering import ask_all
from harness import PREFILL_CHUNK, Place
from ringtest import serving


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def broken(tmp_path_factory):
    """A ring of three whose parts are killed and frozen; begin with `await broken.serving()`."""
    async with serving(tmp_path_factory.mktemp("faults") / "state", 3, prefill_chunk=PREFILL_CHUNK) as ring:
        yield ring


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sealing(broken):
    async with broken.sealing() as client:
        yield client


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def place(broken, sealing):
    """The ring with the answers that it gives while nothing happens."""
    await broken.serving()
    return Place(broken, sealing, await ask_all(broken, sealing))
