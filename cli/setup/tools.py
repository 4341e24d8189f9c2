"""The settings that `sealring connect` writes: one entry a tool, filled in with the values of `values_of`.

Prefix caches live only while a prompt begins as the one before did: where a tool changes the beginning by
itself, its entry turns that off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from string import Template
from typing import Any, Literal

from sealring.cli.calls.models import Served
from sealring.mesh.errors import ConfigError
from sealring.mesh.system.files import read_bounded, write_atomic

TOOLS_FIT_FROM = 32_768
"""Open WebUI's own tools take 4,300 tokens of every prompt. Below this context they are turned off."""

_ROOMY = 65_536
"""A context in which agents get some work done."""

_MOST_OUTPUT = 32_000
"""What agents ask for by themselves. They keep as many tokens free: in a small context it has to be less."""


@dataclass(frozen=True)
class Tool:
    """Settings of one tool. `file` is below the home folder, empty where nothing can be written for it.

    As `json` they are merged into the file's object, as `own` they are a whole file, as `end` they are added
    to what the file holds. `beside` are whole files that they refer to. `frame` is what the program needs in
    its object, whoever wrote the rest. `entry` leads to one that is ours as a whole, with what the program
    adds to it.
    """

    content: Any
    then: str
    file: str = ""
    kind: Literal["json", "own", "end"] = "own"
    file_on_macs: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    frame: Mapping[str, Any] = field(default_factory=dict)
    entry: tuple[str, ...] = ()
    begins: int = 0
    """About how many tokens the program's first prompt has, where that is more than small contexts hold."""

    def too_long(self, model: Served) -> str:
        """What is to be done where the context holds no first prompt and answer; empty where it does."""
        if self.begins + _most_output(model.context) <= model.context or not self.begins:
            return ""
        return (
            f"its first prompt has about {self.begins:,} tokens, and the context of {model.name} holds "
            f"{model.context:,}: serve a model that was made for {_ROOMY:,} or more (sealring model fits); "
            f"whether this one was, says: sealring deployment plan MODEL --context {_ROOMY}"
        )


CODEX_INSTRUCTIONS = """\
You are a coding agent in a terminal, on the user's machine, and work in the user's repository.

- Look before you change anything: read the files concerned with exec_command (prefer rg). Do not guess.
- Change files with apply_patch. Make the smallest change that solves the problem at its root, in the style of
  the code around it. Leave everything else alone, and never undo changes that you did not make.
- Go on until the task is done. Then check it: run the tests or the program where there are some.
- Do not commit, delete or install anything unless you are asked to.
- Files named AGENTS.md hold rules for the folder that they are in. Follow them.
- Answer briefly: what you did, where, and what is left. If something failed, say so.
"""
"""Codex gives no instructions of its own to a model that stands in a catalog."""

_CODEX_MODEL = {
    "slug": "$model",
    "display_name": "$model",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "context_window": "$context",
    "input_modalities": "$modalities",
    "shell_type": "unified_exec",
    "apply_patch_tool_type": "freeform",
    "supports_parallel_tool_calls": True,
    "supported_reasoning_levels": [],
    "support_verbosity": False,
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "experimental_supported_tools": [],
    "base_instructions": CODEX_INSTRUCTIONS,
}

TOOLS: dict[str, Tool] = {
    "claude": Tool(
        {
            "env": {
                "ANTHROPIC_BASE_URL": "$url",
                "ANTHROPIC_AUTH_TOKEN": "$key",
                "ANTHROPIC_MODEL": "$model",
                "ANTHROPIC_DEFAULT_FABLE_MODEL": "$model",
                "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
                "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$small",
                # AUTO_COMPACT_WINDOW takes nothing below 100k, and without either it believes in 1m tokens
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "${context}",
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "${output}",
                # sonnet[1m] and "default" would mean 1m tokens as well
                "CLAUDE_CODE_DISABLE_1M_CONTEXT": "1",
                # a line at the beginning of each prompt with a checksum of its own: no prefix would be found
                "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
                # what git says, which a new session would begin with: the model can ask for it
                "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "API_TIMEOUT_MS": "3600000",
            }
        },
        "run: claude",
        ".claude/settings.json",
        "json",
        begins=24_000,
    ),
    "codex": Tool(
        """model = "$model"
model_provider = "sealring"
model_context_window = $context
model_catalog_json = "$home/.codex/sealring.models.json"
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
        beside={".codex/sealring.models.json": {"models": [_CODEX_MODEL]}},
    ),
    "opencode": Tool(
        {
            "provider": {
                "sealring": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "sealring",
                    "options": {"baseURL": "$url/v1", "apiKey": "$key"},
                    "models": {
                        "$small": {
                            "name": "$small",
                            "limit": {"context": "$small_context", "output": "$small_output"},
                        },
                        "$model": {
                            "name": "$model",
                            "limit": {"context": "$context", "output": "$output"},
                            "modalities": {"input": "$modalities", "output": ["text"]},
                        },
                    },
                }
            },
            "small_model": "sealring/$small",
        },
        "run: opencode --model sealring/$model",
        ".config/opencode/opencode.json",
        "json",
        entry=("provider", "sealring"),
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
        entry=("language_models", "openai_compatible", "sealring"),
    ),
    "llm": Tool(
        '- {"model_id": "sealring", "model_name": "$model", "api_base": "$url/v1",'
        ' "api_key_name": "sealring", "supports_tools": true}\n',
        'run: llm keys set sealring, and enter $key; then: llm -m sealring "Hello!"',
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
    capabilities: [tool_use$and_images]
    defaultCompletionOptions:
      contextLength: $context
      maxTokens: $output
""",
        "choose the assistant sealring in Continue, or run: cn --config ~/.continue/assistants/sealring.yaml",
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
# else a chat ends with an error when it has filled the context, and its length is a guess by characters
ENABLE_CONTEXT_COMPACTION="true"
CONTEXT_COMPACTION_TOKEN_THRESHOLD="$half"
DEFAULT_MODEL_METADATA='{"capabilities": {"usage": true$without_tools}}'
""",
        "start Open WebUI with these in its environment",
        ".config/sealring/open-webui.env",
    ),
    "cline": Tool(
        {
            "lastUsedProvider": "openai-compatible",
            "providers": {
                "openai-compatible": {
                    "settings": {
                        "provider": "openai-compatible",
                        "apiKey": "$key",
                        "baseUrl": "$url/v1",
                        "model": "$model",
                        "contextWindow": "$context",
                        "maxTokens": "$output",
                    },
                    "updatedAt": "2026-01-01T00:00:00.000Z",
                    "tokenSource": "manual",
                }
            },
        },
        "run: cline; in an editor, enter the same in Cline's settings, with a context window of ${context}",
        ".cline/data/settings/providers.json",
        "json",
        frame={"version": 1, "modes": {}, "providers": {}},
        entry=("providers", "openai-compatible"),
    ),
    "qwen-code": Tool(
        {
            "security": {"auth": {"selectedType": "openai", "baseUrl": "$url/v1", "apiKey": "$key"}},
            "model": {
                "name": "$model",
                # without them it believes in the context of a model that has a like name
                "generationConfig": {
                    "contextWindowSize": "$context",
                    "samplingParams": {"max_tokens": "$output"},
                },
            },
        },
        "run: qwen",
        ".qwen/settings.json",
        "json",
    ),
    "pi": Tool(
        {
            "providers": {
                "sealring": {
                    "baseUrl": "$url/v1",
                    "api": "openai-completions",
                    "apiKey": "$key",
                    "models": [{"id": "$model", "contextWindow": "$context", "maxTokens": "$output"}],
                }
            }
        },
        "run: pi --model sealring/$model",
        ".pi/agent/models.json",
        "json",
        entry=("providers", "sealring"),
    ),
    "aider": Tool(
        """openai-api-base: $url/v1
openai-api-key: $key
model: openai/$model
model-metadata-file: "$home/.aider.sealring.json"
""",
        "run: aider",
        ".aider.conf.yml",
        "end",
        beside={
            ".aider.sealring.json": {
                "openai/$model": {
                    "max_input_tokens": "$context",
                    "max_output_tokens": "$output",
                    "litellm_provider": "openai",
                    "mode": "chat",
                }
            }
        },
    ),
    "langchain": Tool(
        """from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="$model", base_url="$url/v1", api_key="$key")
print(model.invoke("Hello!").text)
""",
        "a program of yours says this",
    ),
    "python": Tool(
        """from openai import OpenAI

client = OpenAI(base_url="$url/v1", api_key="$key")
asked = [{"role": "user", "content": "Hello!"}]
print(client.chat.completions.create(model="$model", messages=asked).choices[0].message.content)
""",
        "a program of yours says this, after: pip install openai",
    ),
    "curl": Tool(
        """echo "authorization: Bearer $key" | curl $url/v1/chat/completions -H @- \\
  -H "content-type: application/json" \\
  -d '{"model": "$model", "messages": [{"role": "user", "content": "Hello!"}]}'
""",
        "run it as it stands",
    ),
}


def _most_output(context: int) -> int:
    return max(1, min(_MOST_OUTPUT, context // 4))


Values = dict[str, str | int | list[str]]


def values_of(url: str, model: Served, small: Served, key: str, home: Path) -> Values:
    """What stands for the names in an entry.

    `$model` and `$small` are names, `$context` and `$small_context` their contexts. Besides, there are
    `$output` and `$small_output`, the most tokens of one answer, and `$half` of the context.
    `$without_tools` turns Open WebUI's own tools off where the context is small. `$modalities` are what the
    model reads, and `$and_images` says so to Continue where images are among them.
    """
    context = model.context
    return {
        "url": url,
        "model": model.name,
        "small": small.name,
        "small_context": small.context,
        "small_output": _most_output(small.context),
        "key": key,
        "context": context,
        "home": json.dumps(str(home), ensure_ascii=False)[1:-1],  # as in a string of TOML
        "half": context // 2,
        "output": _most_output(context),
        "without_tools": "" if context >= TOOLS_FIT_FROM else ', "builtin_tools": false',
        "modalities": ["text", "image"] if model.sees else ["text"],
        "and_images": ", image_input" if model.sees else "",
    }


def filled(content: Any, values: Values) -> Any:
    """The content with its values. `$context` alone becomes a number, `${context}` a text."""
    if isinstance(content, str):
        name = content.removeprefix("$")
        value = values.get(name) if content.startswith("$") else None
        return value if isinstance(value, int | list) else Template(content).substitute(values)
    if isinstance(content, list):
        return [filled(one, values) for one in content]
    if isinstance(content, dict):
        return {filled(name, values): filled(one, values) for name, one in content.items()}
    return content


def shown(content: Any) -> str:
    """As it stands in a file."""
    return content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"


BACKUP = ".before-sealring"
_BEGIN, _END = "# sealring connect writes from here\n", "# to here\n"


class Settings:
    """One tool's file, and beside it a copy of what it held before, named as it and `BACKUP`.

    The copy of an object, or of a file at whose end lines are added, is made once, so that it never holds
    settings of ours. A whole file is ours by its name: its copy is of what the last write replaced.
    """

    def __init__(self, file: Path, record: Path) -> None:
        """`record` is of an earlier version, which kept there what a file had held."""
        self._file = file.resolve()  # what a link leads to, not the link
        self._backup = self._file.with_name(self._file.name + BACKUP)
        self._record = record

    def write(self, tool: Tool, content: Any) -> str:
        """Adds the content, in place of what was written before. Returns the command that takes it out.

        Raises ConfigError (BAD_CONFIG_FILE).
        """
        now, before = self._text(self._file), self._text(self._backup)
        record = json.loads(self._text(self._record) or "null")
        kept = now if record is None else record["before"]
        if tool.kind == "end":
            held = (now or "").replace(record["own"] if record else "", "")
            others, found, ours = held.partition(_BEGIN)
            if found:
                held = others + ours.partition(_END)[2]
            kept = held or None
            after = (held.rstrip("\n") + "\n" if held else "") + _BEGIN + content + _END
        elif tool.kind == "json":
            after = shown(_merged({**tool.frame, **self._object(now)}, content, tool.entry))
            kept = kept or shown(dict(tool.frame))
        else:
            after = shown(content)
            before = None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if before is None and kept is not None and kept != after:
            write_atomic(self._backup, kept.encode())
        write_atomic(self._file, after.encode())
        self._record.unlink(missing_ok=True)
        if tool.kind == "own" or not self._backup.exists():
            return f"rm {_quoted(self._file)}"
        return f"mv {_quoted(self._backup)} {_quoted(self._file)}"

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


def _merged(old: dict[str, Any], new: dict[str, Any], entry: tuple[str, ...]) -> dict[str, Any]:
    """Both objects; the value that `entry` leads to is of the new one alone."""
    both = dict(old)
    for name, value in new.items():
        inner = entry[1:] if entry[:1] == (name,) else ()
        whole = entry == (name,) or not (isinstance(value, dict) and isinstance(old.get(name), dict))
        both[name] = value if whole else _merged(old[name], value, inner)
    return both


def _quoted(file: Path) -> str:
    """A path as a shell takes it, from the home folder where it is below that."""
    home = Path.home().resolve()
    return f"~/{quote(str(file.relative_to(home)))}" if file.is_relative_to(home) else quote(str(file))
