"""`sealring connect`: settings of tools are printed, written and put back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.system.paths import proxy_key_file


class Edge(BaseHTTPRequestHandler):
    models: Any = [{"id": "demo", "context_length": 4096}]

    key = ""

    def do_GET(self) -> None:
        body = json.dumps({"data": self.models}).encode()
        right = self.headers.get("authorization") == f"Bearer {self.key}"
        self.send_response(200 if right or not self.key else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def edge() -> type[Edge]:
    """An edge of the test's own, which asks for no key."""
    return type("Own", (Edge,), {})


@pytest.fixture
def url(edge: type[Edge]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), edge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_as_a_user_runs_it(here: Any, home: Path, url: str) -> None:
    made = here("connect", "claude", "--url", f"{url}/v1", "--write")
    assert made.status == 0, made.err
    told = json.loads((home / ".claude" / "settings.json").read_text())["env"]
    assert (told["ANTHROPIC_BASE_URL"], told["ANTHROPIC_MODEL"]) == (url, "demo")
    assert told["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert here("connect", "claude", "--undo").status == 0
    assert not (home / ".claude" / "settings.json").exists()
    shown = here("connect", "curl", "--url", url)
    assert f"{url}/v1/chat/completions" in shown.out
    assert here("connect", "langchain", "--url", url, "--write").status != 0
    assert "no model" in here("connect", "curl", "--url", url, "--model", "other").err
    assert "models" in here("connect", "curl", "--url", "http://127.0.0.1:9").err


def test_programs_get_the_key_of_the_users_own_proxy_where_one_is_asked_for(
    here: Any, home: Path, url: str, edge: type[Edge]
) -> None:
    assert "Bearer none" in here("connect", "curl", "--url", url).out
    edge.key = "srk_own"
    refused = here("connect", "curl", "--url", url)
    assert "[KEY_REFUSED]" in refused.err
    file = proxy_key_file()
    assert file.is_relative_to(home)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("srk_own\n")
    file.chmod(0o600)
    assert "Bearer srk_own" in here("connect", "curl", "--url", url).out
    assert here("connect", "claude", "--url", url, "--write").status == 0
    settings = home / ".claude" / "settings.json"
    assert json.loads(settings.read_text())["env"]["ANTHROPIC_AUTH_TOKEN"] == "srk_own"
    assert settings.stat().st_mode & 0o077 == 0
    edge.key = ""
    assert "srk_own" not in here("connect", "curl", "--url", url).out, "nobody asked for it"


def test_files_that_cannot_be_used_are_named(here: Any, home: Path, url: str) -> None:
    key = home / "key"
    command = ("connect", "zed", "--url", url)
    for content, reason in ((None, "NO_SUCH_FILE"), ("", "BAD_API_KEY_FILE"), ("a\nb", "BAD_API_KEY_FILE")):
        if content is not None:
            key.write_text(content)
            key.chmod(0o600)
        done = here(*command, "--api-key-file", str(key))
        assert (done.status, f"[{reason}]" in done.err, str(key) in done.err) == (7, True, True)
    key.write_text("srk_x\n")
    assert "enter srk_x as its key" in here(*command, "--api-key-file", str(key)).err
    assert "enter none as its key" in here(*command).err
    (home / ".config").write_text("a file")
    assert "~/.config/zed/settings.json cannot be read" in here(*command, "--write").err


def test_tools_that_keep_their_files_elsewhere_on_macs(here: Any, host: Any, url: str) -> None:
    folder = "io.datasette.llm/extra-openai-models.yaml"
    for host.platform, file in (
        ("darwin", f"Library/Application Support/{folder}"),
        ("linux", f".config/{folder}"),
    ):
        assert f"~/{file}:\n" in here("connect", "llm", "--url", url).err
        assert "~/.codex/sealring.config.toml:\n" in here("connect", "codex", "--url", url).err


def test_what_is_known_is_said(here: Any, home: Path, url: str) -> None:
    done = here("connect", "emacs")
    assert (done.status, "give claude, codex" in done.err) == (2, True)
    done = here("connect", "codex", "--url", f"{url}/")
    files = "~/.codex/sealring.models.json:\n~/.codex/sealring.config.toml:\n"
    assert done.err == f"{files}run: codex --profile sealring\n"
    assert f'base_url = "{url}/v1"' in done.out
    assert here("connect", "curl", "--url", url).err == "run it as it stands\n", "it has no file"
    for way in ("--write", "--undo"):
        assert "curl has no file to be written" in here("connect", "curl", way).err
    done = here("connect", "codex", "--url", url, "--write")
    assert done.err.startswith(
        "wrote ~/.codex/sealring.config.toml; `sealring connect codex --undo` puts back what was there\n"
    )
    assert sorted(file.name for file in (home / ".codex").iterdir()) == [
        "sealring.config.toml",
        "sealring.models.json",
    ]
    assert (
        here("connect", "codex", "--undo").err == "took the settings out of ~/.codex/sealring.config.toml\n"
    )
    assert list((home / ".codex").iterdir()) == []
    assert here("connect", "codex", "--undo").status == 7
