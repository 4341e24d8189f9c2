"""Fixtures of the integration tests: real processes on loopback."""

import pytest
import pytest_asyncio
from ringtest import MODEL, Reference, serving


@pytest.fixture(scope="session")
def reference():
    return Reference(MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(tmp_path_factory):
    """A ring of three over the demo model, shared by the tests of a module."""
    async with serving(tmp_path_factory.mktemp("cluster") / "state", 3) as ring:
        yield ring
