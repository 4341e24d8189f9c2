"""`sealring connect`: settings of tools are printed, written and put back."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.setup.tools import TOOLS, Settings, filled, shown
from sealring.mesh.errors import ConfigError, FailedPrecondition

VALUES: dict[str, str | int] = {"url": "http://h:1", "model": "demo", "key": "none", "context": 4096}


class Edge(BaseHTTPRequestHandler):
    models: Any = [{"id": "demo", "context_length": 4096}]

    def do_GET(self) -> None:
        body = json.dumps({"data": self.models}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Edge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


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


def test_as_a_user_runs_it(sealring: Any, here: Any, home: Path, url: str) -> None:
    made = sealring("connect", "claude", "--url", f"{url}/v1", "--write")
    assert made.status == 0, made.err
    told = json.loads((home / ".claude" / "settings.json").read_text())["env"]
    assert (told["ANTHROPIC_BASE_URL"], told["ANTHROPIC_MODEL"]) == (url, "demo")
    assert told["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert sealring("connect", "claude", "--undo").status == 0
    assert not (home / ".claude" / "settings.json").exists()
    shown = here("connect", "curl", "--url", url)
    assert f"{url}/v1/chat/completions" in shown.out
    assert here("connect", "cline", "--url", url, "--write").status != 0
    assert "no model" in here("connect", "curl", "--url", url, "--model", "other").err
    assert "models" in here("connect", "curl", "--url", "http://127.0.0.1:9").err
