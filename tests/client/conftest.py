"""A scripted gateway that listens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sealring.testing import ScriptedGateway


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with ScriptedGateway() as gateway:
        yield gateway
