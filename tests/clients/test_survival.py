"""Sessions of agents go on when a part of the cluster is killed in the middle of an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from programs import (
    BREAKS,
    ENDED,
    LONG,
    PROGRAMS,
    SURVIVORS,
    WRITTEN,
    command,
    cue,
    is_installed,
    note,
)
from ringtest import AGENTS, HANG_SECONDS, Ring
from scriptedring import NAME, WAYS, Served, connect, end_all_of, prepared, run

pytestmark = AGENTS
DOWN_SECONDS = 2.0
"""After which a killed component is started again, as launchd would."""


async def _answering(ring: Ring, before: float) -> None:
    """Returns when a long answer is under way."""
    async with asyncio.timeout(HANG_SECONDS):
        while await ring.counted("generation_tokens_total") < before + 200:
            await asyncio.sleep(0.02)


async def _break(ring: Ring, part: str) -> None:
    """Kills a part while it answers, and starts it again."""
    name = ring.cluster.node_names[0] if part == "member" else part
    assert await ring.counted("num_requests_running") > 0, "the answer has ended already"
    await ring.cluster.children.kill_one(name)
    await asyncio.sleep(DOWN_SECONDS)
    await ring.cluster.start_one(name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", BREAKS)
@pytest.mark.parametrize("name", SURVIVORS)
async def test_a_session_goes_on(name: str, part: str, way: str, served: Served, tmp_path: Path) -> None:
    program, ring = PROGRAMS[name], served.ring
    home, work, environ = prepared(served, name, tmp_path)

    def asked(number: int) -> list[str]:
        names = {"prompt": f"{cue(name, number)}, please.", "model": NAME, "home": str(home)}
        return command((program.first, program.then)[number - 3], **names)

    await ring.serving()
    with note(f"{name}.{part}", way) as row:
        assert is_installed(program), f"{program.package} is not installed"
        url = ring.cluster.http_url if way == "clear" else served.urls[way]  # nothing between that stays up
        await connect(name, url, environ, "--write")
        before = await ring.counted("generation_tokens_total")
        first = asyncio.ensure_future(run(asked(3), work, environ))
        try:
            await _answering(ring, before)
            await _break(ring, part)
            assert LONG in await first
            assert ENDED in await run(asked(4), work, environ)
        finally:
            first.cancel()
            end_all_of(home)
            await ring.serving()
        assert (work / "list.txt").read_text() == WRITTEN
        row["tools"] = "asks again, and goes on" if (part, way) == ("gateway", "clear") else "goes on"
