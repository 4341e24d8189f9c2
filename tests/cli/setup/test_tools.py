"""What `sealring connect` writes into the files of tools, and how it puts them back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.calls.models import Served
from sealring.cli.setup.tools import TOOLS, Settings, Tool, filled, shown, values_of
from sealring.mesh.errors import ConfigError, FailedPrecondition

DEMO = Served("demo", 4096)
VALUES = values_of("http://h:1", DEMO, DEMO, "none", Path("/home/me"))


def test_programs_know_that_a_model_sees() -> None:
    for sees in (False, True):
        model = Served("demo", 4096, sees)
        values = values_of("http://h:1", model, model, "none", Path("/home/me"))
        modalities = ["text", "image"] if sees else ["text"]
        (catalog,) = TOOLS["codex"].beside.values()
        assert filled(catalog, values)["models"][0]["input_modalities"] == modalities
        opencode = filled(TOOLS["opencode"].content, values)["provider"]["sealring"]["models"]["demo"]
        assert opencode["modalities"] == {"input": modalities, "output": ["text"]}
        continued = filled(TOOLS["continue"].content, values)
        assert f"capabilities: [tool_use{', image_input' * sees}]\n" in continued


@pytest.mark.parametrize("name", TOOLS)
def test_every_entry_names_where_and_is_well_formed(name: str, tmp_path: Path) -> None:
    tool = TOOLS[name]
    text = shown(filled(tool.content, VALUES))
    assert "http://h:1" in text
    assert "$" not in text
    assert filled(tool.then, VALUES)
    if tool.kind == "json":
        assert tool.file
        assert isinstance(json.loads(text), dict)
    elif tool.file.endswith(".toml"):
        assert tomllib.loads(text)["model_context_window"] == 4096


@pytest.mark.parametrize("context", [2, 2048, 32_768, 65_536, 1 << 20])
def test_no_tool_asks_for_more_tokens_than_a_context_holds_beside_a_prompt(context: int) -> None:
    values = values_of("http://h:1", *[Served("demo", context)] * 2, "none", Path("/home/me"))
    limit = filled(TOOLS["opencode"].content, values)["provider"]["sealring"]["models"]["demo"]["limit"]
    assert limit["context"] == context
    assert 0 < limit["output"] <= context / 2
    told = filled(TOOLS["claude"].content, values)["env"]
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context)
    assert told["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(limit["output"])
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in told, "it takes nothing below 100k"


def test_a_small_model_gets_what_programs_ask_of_one() -> None:
    values = values_of("http://h:1", DEMO, Served("tiny", 2048), "none", Path("/home/me"))
    told = filled(TOOLS["claude"].content, values)["env"]
    assert told["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "tiny"
    assert {told[f"ANTHROPIC_DEFAULT_{one}_MODEL"] for one in ("FABLE", "OPUS", "SONNET")} == {"demo"}
    opencode = filled(TOOLS["opencode"].content, values)
    assert opencode["small_model"] == "sealring/tiny"
    limits = {name: one["limit"] for name, one in opencode["provider"]["sealring"]["models"].items()}
    assert limits["tiny"] == {"context": 2048, "output": 512}
    assert limits["demo"]["context"] == 4096


def test_nothing_is_sent_that_the_server_does_not_know() -> None:
    options = filled(TOOLS["opencode"].content, VALUES)["provider"]["sealring"]["options"]
    assert options.keys() == {"baseURL", "apiKey"}


def test_codex_knows_the_model_from_a_catalog_that_its_profile_names() -> None:
    tool = TOOLS["codex"]
    ((file, content),) = tool.beside.items()
    home = Path('/home/o"neill')
    values = values_of("http://h:1", *[Served("org/demo", 4096)] * 2, "none", home)
    profile = tomllib.loads(filled(tool.content, values))
    assert profile["model_catalog_json"] == str(home / file)
    (model,) = filled(content, values)["models"]
    assert (model["slug"], model["context_window"]) == (profile["model"], profile["model_context_window"])
    assert (model["input_modalities"], model["apply_patch_tool_type"]) == (["text"], "freeform")
    assert model["base_instructions"]


@pytest.mark.parametrize(("context", "off"), [(2048, True), (131_072, False)])
def test_open_webuis_own_tools_are_turned_off_where_they_would_not_fit(context: int, off: bool) -> None:
    values = values_of("http://h:1", *[Served("demo", context)] * 2, "none", Path("/home/me"))
    lines = filled(TOOLS["open-webui"].content, values).splitlines()
    (line,) = [line for line in lines if "DEFAULT_MODEL_METADATA" in line]
    told = json.loads(line.partition("=")[2].strip("'"))["capabilities"]
    assert told == {"usage": True} | ({"builtin_tools": False} if off else {})


@pytest.mark.parametrize("name", [name for name, tool in TOOLS.items() if tool.file])
def test_what_was_there_is_put_back(name: str, tmp_path: Path) -> None:
    tool, file = TOOLS[name], tmp_path / "settings"
    settings = Settings(file, tmp_path / "state" / "record")
    before = {"json": '{"env": {"KEPT": "1"}, "mine": [1]}', "end": "- {}\n", "own": None}[tool.kind]
    if before is not None:
        file.write_text(before)
    for _ in range(2):
        settings.write(tool, filled(tool.content, VALUES))
    told = file.read_text()
    assert "http://h:1" in told
    if tool.kind == "json":
        assert json.loads(told)["mine"] == [1]
        assert json.loads(told)["env"]["KEPT"] == "1"
    elif before:
        assert told.startswith(before)
    settings.undo()
    assert (file.read_text() if file.exists() else None) == before
    with pytest.raises(FailedPrecondition, match="nothing"):
        settings.undo()


def test_what_somebody_changed_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    settings = Settings(file, tmp_path / "record")
    settings.write(TOOLS["codex"], "x = 1\n")
    file.write_text("x = 2\n")
    for attempt in (settings.undo, lambda: settings.write(TOOLS["codex"], "x = 3\n")):
        with pytest.raises(FailedPrecondition, match="changed"):
            attempt()
    (tmp_path / "record").unlink()
    with pytest.raises(FailedPrecondition, match="there already"):
        settings.write(TOOLS["codex"], "x = 3\n")
    file.write_text("// a comment\n{}")
    with pytest.raises(ConfigError, match="not plain JSON"):
        settings.write(TOOLS["zed"], {})
    assert file.read_text() == "// a comment\n{}"


def test_a_value_is_a_number_where_it_stands_alone_and_a_text_elsewhere() -> None:
    content = {"$model": ["$context", "${context}", "$url/v1", True, 7, None], "x": {"y": "$key"}}
    told = {"demo": [4096, "4096", "http://h:1/v1", True, 7, None], "x": {"y": "none"}}
    assert filled(content, VALUES) == told
    assert shown({"é": 1}) == '{\n  "é": 1\n}\n'
    with pytest.raises(KeyError):
        filled("$nobody", VALUES)


@pytest.mark.parametrize(
    ("kind", "before", "content", "after"),
    [
        (
            "json",
            '{"a": {"b": 1, "c": [1]}, "d": 2}',
            {"a": {"b": 3}, "d": {"e": 4}},
            {"a": {"b": 3, "c": [1]}},
        ),
        ("json", '{"a": 1}', {"a": {"b": 3}, "d": {"e": 4}}, {"a": {"b": 3}}),
        ("json", "", {"a": 1, "d": {"e": 4}}, {"a": 1}),
        ("end", "- old\n\n\n", "- new\n", "- old\n- new\n"),
        ("end", "- old", "- new\n", "- old\n- new\n"),
        ("end", "", "- new\n", "- new\n"),
    ],
)
def test_settings_join_what_is_there(
    tmp_path: Path, kind: str, before: str, content: object, after: object
) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text(before)
    link.symlink_to(file)
    Settings(link, tmp_path / "state" / "record").write(Tool(content, "", "x", kind), content)  # type: ignore[arg-type]
    text = file.read_text()
    assert link.is_symlink(), "dotfiles often are links to where they are kept"
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    if isinstance(after, dict):
        assert json.loads(text) == after | {"d": {"e": 4}}
        assert text.endswith("}\n")
    else:
        assert text == after


@pytest.mark.parametrize("content", [b"[]", b"7", b'{"a": 1', b"\xff"])
def test_what_is_not_understood_is_not_touched(tmp_path: Path, content: bytes) -> None:
    file, record = tmp_path / "file", tmp_path / "record"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        Settings(file, record).write(TOOLS["zed"], {})
    assert (raised.value.reason, file.read_bytes(), record.exists()) == ("BAD_CONFIG_FILE", content, False)


def test_a_file_that_is_gone_needs_no_undoing(tmp_path: Path) -> None:
    file, record = tmp_path / "file", tmp_path / "record"
    settings = Settings(file, record)
    for _ in range(2):
        settings.write(TOOLS["codex"], "x = 1\n")
        file.unlink()
    settings.undo()
    assert (file.exists(), settings.written) == (False, False)


REWRITTEN = [
    # before, what a program made of it after our settings came, what is left of it
    (None, {"env": {"A": "1"}}, None),
    (None, {"env": {"A": "1", "THEIRS": "2"}, "model": "x"}, {"env": {"THEIRS": "2"}, "model": "x"}),
    (
        {"env": {"A": "0", "B": "1"}},
        {"model": "x", "env": {"B": "2", "A": "1"}},
        {"model": "x", "env": {"B": "2", "A": "0"}},
    ),
    ({"keep": 1}, {"keep": 2, "env": {"A": "theirs now"}}, {"keep": 2, "env": {"A": "theirs now"}}),
    ({"env": 7}, {"env": {"A": "1"}, "new": []}, {"env": 7, "new": []}),
    ({"keep": 1}, {}, {}),
]


@pytest.mark.parametrize(("before", "rewritten", "left"), REWRITTEN)
def test_only_our_own_settings_are_taken_back_from_a_file_that_a_program_rewrote(
    tmp_path: Path, before: Any, rewritten: Any, left: Any
) -> None:
    file = tmp_path / "file"
    settings = Settings(file, tmp_path / "record")
    if before is not None:
        file.write_text(json.dumps(before))
    tool = Tool({"env": {"A": "1"}}, "", "x", "json")
    settings.write(tool, tool.content)
    file.write_text(json.dumps(rewritten, indent=7))
    settings.write(tool, {"env": {"A": "9"}})
    assert json.loads(file.read_text())["env"]["A"] == "9"
    settings.undo()
    assert (json.loads(file.read_text()) if file.exists() else None) == left


def test_only_our_own_lines_are_taken_back_from_the_end_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    settings = Settings(file, tmp_path / "record")
    file.write_text("- old\n")
    tool = Tool("- ours\n", "", "x", "end")
    settings.write(tool, tool.content)
    file.write_text("- older\n- ours\n- newer\n")
    settings.undo()
    assert file.read_text() == "- older\n- newer\n"
    settings.write(tool, tool.content)
    file.write_text("- ours, changed\n")
    with pytest.raises(FailedPrecondition, match="changed"):
        settings.undo()


def _cline(**settings: Any) -> dict[str, Any]:
    """A providers.json as Cline leaves it."""
    entry = {"settings": settings, "updatedAt": "2026-11-24T17:16:39.014Z", "tokenSource": "manual"}
    return {"version": 1, "modes": {}, "providers": {"openai-compatible": entry}}


def test_an_entry_that_a_program_stamps_anew_is_taken_back_as_a_whole(tmp_path: Path) -> None:
    file, tool = tmp_path / "providers.json", TOOLS["cline"]
    settings = Settings(file, tmp_path / "record")
    settings.write(tool, filled(tool.content, VALUES))
    told = json.loads(file.read_text())
    assert told["version"] == 1, "Cline reads no file without it"
    told["providers"]["openai-compatible"]["updatedAt"] = "2026-11-24T17:16:39.014Z"
    told["providers"]["openai-compatible"]["settings"]["reasoning"] = {"enabled": True}
    file.write_text(json.dumps(told))
    settings.undo()
    assert not file.exists()
    settings.write(tool, filled(tool.content, VALUES))
    told["providers"]["theirs"] = {"settings": {}}
    file.write_text(json.dumps(told))
    settings.undo()
    assert json.loads(file.read_text()) == {
        "version": 1,
        "modes": {},
        "providers": {"theirs": {"settings": {}}},
    }


def test_an_entry_that_leads_elsewhere_now_is_not_ours(tmp_path: Path) -> None:
    file, tool = tmp_path / "providers.json", TOOLS["cline"]
    settings = Settings(file, tmp_path / "record")
    before = _cline(baseUrl="http://theirs:1", model="a")
    file.write_text(json.dumps(before))
    settings.write(tool, filled(tool.content, VALUES))
    assert json.loads(file.read_text())["providers"]["openai-compatible"]["settings"]["baseUrl"] == (
        "http://h:1/v1"
    )
    moved = _cline(baseUrl="http://other:1", model="b")
    file.write_text(json.dumps(moved))
    settings.undo()
    assert json.loads(file.read_text())["providers"] == moved["providers"]


@pytest.mark.parametrize("context", [2048, 65_536])
def test_agents_know_how_long_the_context_is(context: int) -> None:
    values = values_of("http://h:1", *[Served("demo", context)] * 2, "none", Path("/home/me"))
    qwen = filled(TOOLS["qwen-code"].content, values)["model"]["generationConfig"]
    cline = filled(TOOLS["cline"].content, values)["providers"]["openai-compatible"]["settings"]
    (aider,) = filled(TOOLS["aider"].beside[".aider.sealring.json"], values).values()
    found = [
        (qwen["contextWindowSize"], qwen["samplingParams"]["max_tokens"]),
        (cline["contextWindow"], cline["maxTokens"]),
        (aider["max_input_tokens"], aider["max_output_tokens"]),
    ]
    assert found == [(context, values["output"])] * 3
    lines = filled(TOOLS["continue"].content, values).split("\n")
    assert f"      maxTokens: {values['output']}" in lines, "its own default is more than a short context"
