"""Programs change a file by a text whose indentation counts, told in the notations of several families."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from programs import AFTER, BEFORE, CODE, EDITED, EDITS, PROGRAMS, command, cue, edit_scenes, is_installed
from ringtest import AGENTS
from scriptedring import WAYS, Served, beside, connect, end_all_of, prepared, run

pytestmark = AGENTS
NOTATIONS = {
    "glm": "glm47",
    "qwen3-coder": "qwen3_coder",
    "minimax": "minimax_m2",
    "mistral": "mistral",
    "deepseek": "dsml_v4",
}
CONTEXT = 131_072
MODEL = "other"
"""A name that tells no program anything: Continue offers other tools to models whose names it knows."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=NOTATIONS)
async def family(
    request: pytest.FixtureRequest, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    """A model of this family beside the other."""
    folder, notation = tmp_path_factory.mktemp("m") / "model", NOTATIONS[request.param]
    scenes = [scene for program in EDITS for scene in edit_scenes(program, served.work / program)]
    async with beside(served, MODEL, folder, scenes, context=CONTEXT, ends=400, notation=notation):
        yield request.param


@pytest.mark.parametrize("name", EDITS)
async def test_a_programs_edit_keeps_every_byte(
    name: str, family: str, served: Served, tmp_path: Path
) -> None:
    """In clear and sealed by turns: the head reads the calls of both."""
    way = WAYS[(list(EDITS).index(name) + list(NOTATIONS).index(family)) % len(WAYS)]
    assert is_installed(PROGRAMS[name]), f"{PROGRAMS[name].package} is not installed"
    home, work, environ = prepared(served, name, tmp_path)
    (work / CODE).write_text(BEFORE)
    await connect(name, served.urls[way], environ, "--model", MODEL, "--write")
    asked = {"prompt": f"{cue(name, 9)}, please.", "model": MODEL, "home": str(home)}
    try:
        printed = await run(command(PROGRAMS[name].first, **asked), work, environ)
    finally:
        end_all_of(home)
    assert (work / CODE).read_text() == AFTER
    assert EDITED in printed
