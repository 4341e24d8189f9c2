"""What `sealring connect` writes into the files of tools, and how it puts them back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from sealring.cli.setup.tools import TOOLS, Settings, Tool, filled, shown
from sealring.mesh.errors import ConfigError, FailedPrecondition

VALUES: dict[str, str | int] = {"url": "http://h:1", "model": "demo", "key": "none", "context": 4096}


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


def test_a_tool_that_can_keep_prefixes_is_told_to() -> None:
    told = filled(TOOLS["opencode"].content, VALUES)["provider"]["sealring"]
    assert told["options"]["setCacheKey"] is True
    assert told["models"] == {"demo": {"name": "demo", "limit": {"context": 4096, "output": 8192}}}


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


def test_what_was_removed_since_is_not_put_back(tmp_path: Path) -> None:
    file, record = tmp_path / "file", tmp_path / "record"
    Settings(file, record).write(TOOLS["codex"], "x = 1\n")
    file.unlink()
    with pytest.raises(FailedPrecondition) as raised:
        Settings(file, record).undo()
    assert (raised.value.reason, str(record) in raised.value.hint, file.exists()) == ("CHANGED", True, False)
