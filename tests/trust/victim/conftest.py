from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from attackertest import calling
from ringtest import Ring, serving


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def victim(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    """A ring of two that serves, and one node more."""
    async with calling(), serving(tmp_path_factory.mktemp("victim") / "state", 3, stages=2) as ring:
        yield ring
