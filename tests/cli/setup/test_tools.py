"""What `sealring connect` writes into the files of tools, and how it puts them back."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.calls.models import Served
from sealring.cli.setup.tools import _BEGIN, _END, BACKUP, TOOLS, Settings, Tool, filled, shown, values_of
from sealring.mesh.errors import ConfigError

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


def taken_back(command: str, tmp_path: Path) -> None:
    """Does what `Settings.write` says takes the settings out."""
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)


@pytest.mark.parametrize("name", [name for name, tool in TOOLS.items() if tool.file])
@pytest.mark.parametrize("there", [True, False])
def test_what_was_there_is_put_back(name: str, tmp_path: Path, there: bool) -> None:
    """However often the settings are written: the copy beside the file never holds any of ours."""
    tool, file = TOOLS[name], tmp_path / "the settings"
    held = {"json": '{"env": {"KEPT": "1"}, "mine": [1]}', "end": "- {}\n", "own": None}[tool.kind]
    before = held if there else None
    if before is not None:
        file.write_text(before)
    for _ in range(2):
        back = Settings(file, tmp_path / "state" / "record").write(tool, filled(tool.content, VALUES))
    told = file.read_text()
    assert told.count("http://h:1") == shown(filled(tool.content, VALUES)).count("http://h:1")
    if before and tool.kind == "json":
        assert json.loads(told)["mine"] == [1]
        assert json.loads(told)["env"]["KEPT"] == "1"
    elif before:
        assert told.startswith(before)
    taken_back(back, tmp_path)
    nothing = shown(dict(tool.frame)) if tool.kind == "json" else None
    assert (file.read_text() if file.exists() else None) == (before or nothing)
    assert not file.with_name(file.name + BACKUP).exists()


def test_a_file_of_ours_that_somebody_changed_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    for content in ("x = 1\n", "x = 3\n"):
        Settings(file, tmp_path / "record").write(TOOLS["codex"], content)
        file.write_text(content + "y = 2\n")
    assert file.with_name(file.name + BACKUP).read_text() == "x = 1\ny = 2\n"


@pytest.mark.parametrize(
    ("kind", "before", "now", "own", "after"),
    [
        ("json", '{"a": 1}', '{"a": 1, "b": 2}', [[["b"], 2, []]], '{\n  "a": 1,\n  "b": 3\n}\n'),
        ("end", "- a\n", "- a\n- b: 2\n- theirs\n", "- b: 2\n", None),
    ],
)
def test_what_an_earlier_version_has_written_is_replaced(
    tmp_path: Path, kind: Any, before: str, now: str, own: Any, after: str | None
) -> None:
    """Its record holds what was there before."""
    file, record = tmp_path / "settings", tmp_path / "record"
    file.write_text(now)
    record.write_text(json.dumps({"before": before, "after": "x", "kind": kind, "own": own, "frame": {}}))
    content: Any = {"b": 3} if kind == "json" else "- b: 3\n"
    Settings(file, record).write(Tool(content, "", "x", kind), content)
    told, kept = file.read_text(), file.with_name(file.name + BACKUP).read_text()
    if kind == "json":
        assert (told, kept) == (after, before)
    else:
        assert (told.count("- b"), kept) == (1, "- a\n- theirs\n")
    assert not record.exists()


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
    if isinstance(after, dict):
        assert json.loads(text) == after | {"d": {"e": 4}}
        assert text.endswith("}\n")
    else:
        assert text.replace(_BEGIN, "").replace(_END, "") == after


@pytest.mark.parametrize("content", [b"[]", b"7", b'{"a": 1', b"\xff"])
def test_what_is_not_understood_is_not_touched(tmp_path: Path, content: bytes) -> None:
    file, record = tmp_path / "file", tmp_path / "record"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        Settings(file, record).write(TOOLS["zed"], {})
    assert (raised.value.reason, file.read_bytes(), record.exists()) == ("BAD_CONFIG_FILE", content, False)


def test_an_entry_of_ours_is_replaced_as_a_whole_and_others_stay(tmp_path: Path) -> None:
    file, tool = tmp_path / "providers.json", TOOLS["cline"]
    settings = Settings(file, tmp_path / "record")
    settings.write(tool, filled(tool.content, VALUES))
    told = json.loads(file.read_text())
    assert told["version"] == 1, "Cline reads no file without it"
    told["providers"]["openai-compatible"]["settings"]["reasoning"] = {"enabled": True}
    told["providers"]["theirs"] = {"settings": {}}
    file.write_text(json.dumps(told))
    settings.write(tool, filled(tool.content, VALUES))
    del told["providers"]["openai-compatible"]["settings"]["reasoning"]
    assert json.loads(file.read_text()) == told


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
