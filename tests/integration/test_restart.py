"""A local cluster that is started again in its folder."""

from pathlib import Path

import pytest
from ringtest import serving

from gateway.access.keyfile import KeyFile
from gateway.access.keys import Scope

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120), pytest.mark.xdist_group("integration")]


async def test_a_cluster_whose_gateway_has_keys_by_now(tmp_path: Path) -> None:
    """Whoever starts it has none, and is told all the same that it serves."""
    async with serving(tmp_path / "state", 1):
        pass
    KeyFile(tmp_path / "state" / "gateway").create([Scope.INFERENCE])
    async with serving(tmp_path / "state", 1):
        pass
