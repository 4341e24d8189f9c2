import pytest_asyncio
from ringtest import serving


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def broken(tmp_path_factory):
    """A ring of three whose parts are killed and frozen; begin with `await broken.serving()`."""
    async with serving(tmp_path_factory.mktemp("faults") / "state", 3) as ring:
        yield ring
