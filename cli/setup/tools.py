"""What `sealring connect` writes: one entry a tool, where `$url`, `$model`, `$key`, `$context` are filled in.

Prefix caches live only while a prompt begins as the one before did: where a tool changes the beginning by
itself, its entry turns that off.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.mesh.system.files import read_bounded, write_atomic


@dataclass(frozen=True)
class Tool:
    """Settings of one tool. `file` is below the home folder, empty where nothing can be written for it.

    As `json` they are merged into the file's object, as `own` they are a whole file, as `end` they are added
    to what the file holds.
    """

    content: Any
    then: str
    file: str = ""
    kind: Literal["json", "own", "end"] = "own"
    file_on_macs: str = ""


TOOLS: dict[str, Tool] = {
    "claude": Tool(
        {
            "env": {
                "ANTHROPIC_BASE_URL": "$url",
                "ANTHROPIC_AUTH_TOKEN": "$key",
                "ANTHROPIC_MODEL": "$model",
                "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
                "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
                "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "${context}",
                # a line at the beginning of each prompt with a checksum of its own: no prefix would be found
                "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "API_TIMEOUT_MS": "3600000",
            }
        },
        "run: claude",
        ".claude/settings.json",
        "json",
    ),
    "codex": Tool(
        """model = "$model"
model_provider = "sealring"
model_context_window = $context
web_search = "disabled"

[model_providers.sealring]
name = "sealring"
base_url = "$url/v1"
wire_api = "responses"
experimental_bearer_token = "$key"
stream_idle_timeout_ms = 3600000
""",
        "run: codex --profile sealring",
        ".codex/sealring.config.toml",
    ),
    "opencode": Tool(
        {
            "provider": {
                "sealring": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "sealring",
                    "options": {"baseURL": "$url/v1", "apiKey": "$key", "setCacheKey": True},
                    "models": {
                        "$model": {"name": "$model", "limit": {"context": "$context", "output": 8192}}
                    },
                }
            }
        },
        "run: opencode --model sealring/$model",
        ".config/opencode/opencode.json",
        "json",
    ),
    "zed": Tool(
        {
            "language_models": {
                "openai_compatible": {
                    "sealring": {
                        "api_url": "$url/v1",
                        "available_models": [{"name": "$model", "max_tokens": "$context"}],
                    }
                }
            }
        },
        "choose $model in Zed's agent panel and enter $key as its key",
        ".config/zed/settings.json",
        "json",
    ),
    "llm": Tool(
        '- {"model_id": "sealring", "model_name": "$model", "api_base": "$url/v1",'
        ' "api_key_name": "sealring", "supports_tools": true}\n',
        'run: llm keys set sealring --value "$key"; llm -m sealring "Hello!"',
        ".config/io.datasette.llm/extra-openai-models.yaml",
        "end",
        "Library/Application Support/io.datasette.llm/extra-openai-models.yaml",
    ),
    "continue": Tool(
        """name: sealring
version: 1.0.0
schema: v1
models:
  - name: $model
    provider: openai
    model: $model
    apiBase: $url/v1
    apiKey: $key
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: $context
""",
        "choose the assistant sealring in Continue",
        ".continue/assistants/sealring.yaml",
    ),
    "open-webui": Tool(
        """OPENAI_API_BASE_URL="$url/v1"
OPENAI_API_KEY="$key"
ENABLE_OLLAMA_API="false"
# each would send the conversation again below another beginning
ENABLE_TITLE_GENERATION="false"
ENABLE_TAGS_GENERATION="false"
ENABLE_FOLLOW_UP_GENERATION="false"
ENABLE_AUTOCOMPLETE_GENERATION="false"
""",
        "start Open WebUI with these in its environment",
        ".config/sealring/open-webui.env",
    ),
    "cline": Tool(
        """API Provider: OpenAI Compatible
Base URL: $url/v1
API Key: $key
Model ID: $model
Context Window Size: $context
""",
        "enter these in Cline's settings, which only Cline itself can write",
    ),
    "langchain": Tool(
        """from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="$model", base_url="$url/v1", api_key="$key")
print(model.invoke("Hello!").text)
""",
        "a program of yours says this",
    ),
    "curl": Tool(
        """curl $url/v1/chat/completions -H "authorization: Bearer $key" \\
  -H "content-type: application/json" \\
  -d '{"model": "$model", "messages": [{"role": "user", "content": "Hello!"}]}'
""",
        "run it as it stands",
    ),
}


def filled(content: Any, values: dict[str, str | int]) -> Any:
    """The content with its values. `$context` alone becomes a number, `${context}` a text."""
    if isinstance(content, str):
        name = content.removeprefix("$")
        number = values.get(name) if content.startswith("$") else None
        return number if isinstance(number, int) else Template(content).substitute(values)
    if isinstance(content, list):
        return [filled(one, values) for one in content]
    if isinstance(content, dict):
        return {filled(name, values): filled(one, values) for name, one in content.items()}
    return content


def shown(content: Any) -> str:
    """As it stands in a file."""
    return content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"


class Settings:
    """One tool's file, and a record beside our own state of what it held before."""

    def __init__(self, file: Path, record: Path) -> None:
        self._file = file.resolve()  # what a link leads to, not the link
        self._record = record

    def write(self, tool: Tool, content: Any) -> None:
        """Adds the content.

        Raises ConfigError (BAD_CONFIG_FILE), FailedPrecondition (ALREADY_THERE, CHANGED).
        """
        if self._record.exists():
            self.undo()
        before = self._text(self._file)
        if tool.kind == "own" and before is not None:
            raise FailedPrecondition(
                f"{self._file} is there already", hint="move it away", reason="ALREADY_THERE"
            )
        if tool.kind == "end" and before:
            content = before.rstrip("\n") + "\n" + content
        elif tool.kind == "json":
            content = _merged(self._object(before), content)
        after = shown(content)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = {"before": before, "after": hashlib.sha256(after.encode()).hexdigest()}
        write_atomic(self._record, json.dumps(record).encode())
        write_atomic(self._file, after.encode())

    def undo(self) -> None:
        """Puts back what was there. Raises FailedPrecondition (NOTHING_WRITTEN, CHANGED)."""
        told = self._text(self._record)
        if told is None:
            raise FailedPrecondition("nothing was written for this tool", reason="NOTHING_WRITTEN")
        record, now = json.loads(told), self._text(self._file)
        if now is None or hashlib.sha256(now.encode()).hexdigest() != record["after"]:
            raise FailedPrecondition(
                f"{self._file} was changed since",
                hint=f"take the settings out by hand, then remove {self._record}",
                reason="CHANGED",
            )
        if record["before"] is None:
            self._file.unlink()
        else:
            write_atomic(self._file, record["before"].encode())
        self._record.unlink()

    @staticmethod
    def _text(file: Path) -> str | None:
        try:
            return read_bounded(file).decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise ConfigError(f"{file} is not UTF-8 text", reason="BAD_CONFIG_FILE") from None

    def _object(self, text: str | None) -> dict[str, Any]:
        try:
            value = json.loads(text or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(
                f"{self._file} is not plain JSON",
                hint="it may have comments: add the settings by hand",
                reason="BAD_CONFIG_FILE",
            )
        return value


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(old[name], value)
        if isinstance(value, dict) and isinstance(old.get(name), dict)
        else value
        for name, value in new.items()
    }
    return {**old, **both}
