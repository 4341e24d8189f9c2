"""Agents and frameworks talk with a real ring, in clear and through the proxy."""

import pytest
from agents import NAMES, converse
from ringtest import CLUSTER, proxy

pytestmark = [*CLUSTER, pytest.mark.agents]


@pytest.mark.parametrize("name", NAMES)
async def test_they_talk(name, ring, tmp_path):
    async with proxy(ring, tmp_path) as (sealed, _):
        for url in (ring.cluster.http_url, sealed):
            steps = await converse(name, url, tmp_path, tools=False)
            assert steps
            assert all(steps)
