"""A prompt's beginning outlives every process on the disks of members; broken disks cost nothing."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, started
from sharing import ask

from sealring.cli.local.cluster import LocalCluster

pytestmark = CLUSTER

WORDS = ("river", "stone", "garden", "winter", "market", "silver", "window", "bridge", "letter", "candle")
SYSTEM = " ".join(random.Random(5).choice(WORDS) for _ in range(300)) + " marigold"


def messages(*more: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, *({"role": "user", "content": text} for text in more)]


def blocks(state: Path) -> list[Path]:
    return sorted(state.glob("node-*/prefixes/*/*/*.block"))


async def test_a_prompt_is_found_after_everything_was_restarted(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with LocalCluster(state, str(MODEL), nodes=2) as cluster, started(cluster, stages=2) as ring:
        cold = await ask(ring, messages("Hello!"))
        assert cold.cached == 0
        assert cold.prompt_tokens > 300
        async with asyncio.timeout(LIMIT_SECONDS):  # they are written behind
            while len({path.parents[2] for path in blocks(state)}) < 2:
                await asyncio.sleep(0.2)
    stolen = b"".join(
        path.read_bytes() for path in (*blocks(state), *state.glob("node-*/prefixes/*/*")) if path.is_file()
    )
    assert b"marigold" not in stolen
    async with LocalCluster(state, str(MODEL), nodes=2) as cluster, started(cluster) as ring:
        warm = await ask(ring, messages("Hello!"))
        assert warm.cached >= 256
        assert warm.text == cold.text
        other = await ask(ring, messages("Something else!"))
        assert other.cached >= 256
        assert await ring.counted("prefix_cache_disk_tokens_total") >= 256
    shutil.rmtree(state / "node-1" / "prefixes")
    (state / "node-1" / "prefixes").write_bytes(b"")
    async with LocalCluster(state, str(MODEL), nodes=2) as cluster, started(cluster) as ring:
        without = await ask(ring, messages("Hello!"))
        assert (without.cached, without.text) == (0, cold.text)
        assert (await ask(ring, messages("Hello!"))).cached >= 256, "memory serves as ever"
