import pytest_asyncio
from ringtest import proxy, serving

ONE_MORE_FITS = "1200MB"
"""A node's second engine and its third are counted with half a GiB each."""


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def ring(tmp_path_factory):
    """A ring of three over the demo model, which no test breaks."""
    async with serving(tmp_path_factory.mktemp("ring") / "state", 3, ONE_MORE_FITS) as ring:
        yield ring


@pytest_asyncio.fixture(loop_scope="session")
async def client(ring):
    async with ring.openai() as client:
        yield client


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sealed(ring, tmp_path_factory):
    """The URL of a proxy before it, which seals."""
    async with proxy(ring, tmp_path_factory.mktemp("sealed")) as (url, _):
        yield url
