import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


async def test_daemons_of_a_serving_ring_stay_small_and_take_their_children_with_them(
    make_bed: Any, eventually: Any
) -> None:
    ring = await make_bed(2, processes=True)
    await ring.deploy()
    await ring.form()
    gateway = await ring.attach()
    assert await gateway.generate("What is the capital of France?", 8)
    for node in ring.nodes:
        await ring.coordinator.hears(node.id, "roster_seen")
    daemons = [psutil.Process(node.process.pid) for node in ring.nodes]
    children = [child for daemon in daemons for child in daemon.children()]
    assert len(children) == 4
    for daemon in daemons:
        assert daemon.memory_info().rss < 150 << 20
        if sys.platform == "linux":
            assert "libmlx" not in Path(f"/proc/{daemon.pid}/maps").read_text()
    ring.nodes[0].process.kill()
    ring.nodes[0].process.wait(200)
    assert (await ring.coordinator.hears(ring.nodes[1].id, "fault")).problem.reason
    await eventually(lambda: sum(child.is_running() for child in children) == 1)
    await gateway.close()
    await ring.nodes[1].end()
    await eventually(lambda: not any(child.is_running() for child in children))
    ring.nodes[0].start(ring.coordinator, b"")
    await ring.coordinator.hears(ring.nodes[0].id, "hello")
