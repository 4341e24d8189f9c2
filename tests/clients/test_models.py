"""Programs name models by themselves, use two at once, have a command judged, or show a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import (
    ENDED,
    FOUND,
    HABITS,
    INSTALLED,
    LOOKS,
    PICTURE,
    PROGRAMS,
    SMALL,
    command,
    cue,
    note,
    picture_scenes,
    small_scenes,
)
from ringtest import AGENTS
from scriptedring import NAME, WAYS, Served, beside, connect, end_all_of, prepared, run
from shownpictures import SEEN

pytestmark = AGENTS
MAKERS = ("claude-haiku-4-5", "claude-opus-5")
NAMES = ("haiku", "sonnet", "opus", "fable", "default", "sonnet[1m]", *MAKERS)
CONTEXT = 131_072


def _asked(served: Served, name: str) -> set[str]:
    """The models that were asked for in clear since the last call."""
    return {one["body"]["model"] for one in served.relay.keep(INSTALLED / "bodies" / f"{name}.jsonl")}


@pytest.mark.parametrize("way", WAYS)
async def test_every_name_that_claude_code_knows_means_the_model(
    way: str, served: Served, tmp_path: Path
) -> None:
    home, work, environ = prepared(served, "claude", tmp_path)
    with note("claude.names", way) as row:
        await connect("claude", served.urls[way], environ, "--write")
        _asked(served, "claude.names")
        try:
            for name in NAMES:
                asked = ["claude", "-p", "--model", name, "--", f"{cue('claude', 5)}, please."]
                assert FOUND in await run(asked, work, environ), name
        finally:
            end_all_of(home)
        if way == "clear":
            assert _asked(served, "claude.names") == {NAME, *MAKERS}
        row["tools"] = HABITS["claude.names"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["claude", "opencode"])
async def test_a_program_uses_a_small_model_beside_the_other(
    name: str, way: str, served: Served, tmp_path: Path
) -> None:
    home, work, environ = prepared(served, name, tmp_path)
    asked = {
        "claude": ["claude", "-p", "--", f"{cue(name, 6)}, please."],
        "opencode": command(PROGRAMS[name].first, prompt=f"{cue(name, 1)}, please.", model=NAME),
    }[name]
    with note(f"{name}.two", way) as row:
        async with beside(served, "small", tmp_path / "m", small_scenes(), context=CONTEXT, ends=400):
            await connect(name, served.urls[way], environ, "--write")
            _asked(served, f"{name}.two")
            try:
                assert (ENDED if name == "claude" else FOUND) in await run(asked, work, environ)
                if name == "opencode":
                    assert SMALL in await run(["opencode", "session", "list"], work, environ)
            finally:
                end_all_of(home)
            if way == "clear":
                assert _asked(served, f"{name}.two") == {NAME, "small"}
        row["tools"] = HABITS[f"{name}.two"]


@pytest.mark.parametrize("way", WAYS)
async def test_codex_has_a_command_judged(way: str, served: Served, tmp_path: Path) -> None:
    home, work, environ = prepared(served, "codex", tmp_path)
    options = ("-c", 'approval_policy="on-request"', "-c", 'approvals_reviewer="auto_review"')
    asked = ("codex", "exec", "--profile", "sealring", "--skip-git-repo-check", "-s", "workspace-write")
    with note("codex.review", way) as row:
        await connect("codex", served.urls[way], environ, "--write")
        _asked(served, "codex.review")
        try:
            assert FOUND in await run([*asked, *options, f"{cue('codex', 5)}, please."], work, environ)
        finally:
            end_all_of(home)
        if way == "clear":
            asked = served.relay.keep(INSTALLED / "bodies" / "codex.review.jsonl")
            assert {one["body"]["model"] for one in asked if "text" in one["body"]} == {NAME}
        row["tools"] = HABITS["codex.review"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOOKS)
async def test_a_picture_that_a_programs_tool_has_read_is_seen(
    name: str, way: str, served: Served, tmp_path: Path
) -> None:
    home, work, environ = prepared(served, name, tmp_path)
    asked = command(PROGRAMS[name].first, prompt=f"{cue(name, 8)}, please.")
    with note(f"{name}.picture", way) as row:
        scenes = picture_scenes(name, work)
        async with beside(served, "eyes", tmp_path / "m", scenes, context=CONTEXT, ends=400, sees=True):
            await connect(name, served.urls[way], environ, "--model", "eyes", "--write")
            try:
                for picture, answer in SEEN.items():
                    (work / PICTURE).write_bytes(picture)
                    assert answer in await run(asked, work, environ)
            finally:
                end_all_of(home)
        row["tools"] = HABITS[f"{name}.picture"]
