"""A scripted gateway that listens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from scriptedgateway import Stage, on_stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with on_stage() as stage:
        yield stage
