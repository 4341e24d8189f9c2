"""Engines that take longer for a step than silence and lost records are waited for are waited for."""

from __future__ import annotations

import sys
from pathlib import Path

from ringtest import CLUSTER, MODEL, chat, started
from slow_engine import SLOW_SECONDS, markers

from sealring.cli.local.cluster import LocalCluster
from sealring.gateway.rings.control import PONG_SECONDS
from sealring.gateway.rings.losses import LOST_SECONDS

pytestmark = CLUSTER
SLOW_NODE = Path(__file__).parents[1] / "support" / "slow_node.py"


async def test_slow_engines_are_waited_for(tmp_path: Path) -> None:
    assert max(PONG_SECONDS, LOST_SECONDS) < SLOW_SECONDS
    async with LocalCluster(tmp_path / "state", MODEL, nodes=2, name="demo") as cluster:
        cluster._children._command = (sys.executable, str(SLOW_NODE))
        async with started(cluster, stages=2) as ring:
            assert (await ring.ask(chat("What is the capital of France?"), 40)).completion_tokens > 1
            assert (await ring.status()).epoch == 1
        assert all(marker.exists() for marker in markers(cluster.state_dir / "tmp")), "none was slow"
