"""The agents that `make clients` installs: how each is run, and what the scripted model has it do.

Each reads a file with a tool of its own and says what is in it. Asked again in the same conversation, it
writes a file and runs a command on it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scriptedmodel import LOOK, Call, Scene, Step, Whole

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / "build" / "clients"
LIST = ROOT / "tests" / "clients" / "programs.txt"
BESIDE = ("aider", "open-webui", "load", "vllm")
"""Environments of their own, from the list of that name in tests/clients."""

NOTES = "Buy three plums.\n"
WRITTEN = "three plums\n"
COMMAND = "tr a-z A-Z < list.txt"
FOUND = "The notes ask for three plums."
ENDED = "The list is written and checked."
LONG_TOKENS = 1500
LONG = " ".join(f"{number:04d}," for number in range(LONG_TOKENS)) + " and no more plums."
"""An answer that is under way for seconds: a token each number."""


def cue(name: str, number: int) -> str:
    """The words by which the scripted model knows its scene."""
    return f"Scene {number} of {name}"


@dataclass(frozen=True)
class Program:
    """One agent. In commands, `{prompt}` and `{model}` are replaced.

    `read` and `write` are its tools and their arguments, in which `{path}` is an absolute path, and
    `run` the tool that runs COMMAND. `held`: it sends a grammar with each request.
    """

    package: str
    title: str
    first: Sequence[str]
    then: Sequence[str]
    read: tuple[str, Mapping[str, Any]]
    write: tuple[str, Mapping[str, Any]]
    run: tuple[str, Mapping[str, Any]]
    held: bool = False
    tools: str = "reads, writes, runs"
    remark: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


_TEST = "tr a-z A-Z < list.txt; test -e seen || { touch seen; exit 1; }"
"""Fails the first time, so that aider shows the model what the command printed."""

_AIDER = ("aider", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable")

_CODEX = ("codex", "exec", "--profile", "sealring", "--skip-git-repo-check", "-s", "danger-full-access")
_CONTINUE = ("cn", "-p", "--auto", "--config", "{home}/.continue/assistants/sealring.yaml")

PROGRAMS = {
    "aider": Program(
        "aider-chat",
        "aider",
        (*_AIDER, "--message", "/ask {prompt}", "notes.txt"),
        (*_AIDER, "--restore-chat-history", "--auto-test", "--test-cmd", _TEST, "--message", "{prompt}"),
        ("", {}),
        ("", {}),
        ("", {}),
        tools="has none; reads, edits, runs a test",
        remark="edits by text, and runs the test that it is given",
    ),
    "claude": Program(
        "@anthropic-ai/claude-code",
        "Claude Code",
        ("claude", "-p", "--allowedTools", "Read,Edit,Write,Bash", "--", "{prompt}"),
        ("claude", "-p", "--continue", "--allowedTools", "Read,Edit,Write,Bash", "--", "{prompt}"),
        ("Read", {"file_path": "{path}"}),
        ("Write", {"file_path": "{path}", "content": WRITTEN}),
        ("Bash", {"command": COMMAND, "description": "Check the list"}),
    ),
    "codex": Program(
        "@openai/codex",
        "Codex CLI",
        (*_CODEX, "{prompt}"),
        (*_CODEX, "resume", "--last", "{prompt}"),
        ("exec_command", {"cmd": "cat notes.txt"}),
        (
            "apply_patch",
            {"input": "*** Begin Patch\n*** Add File: list.txt\n+three plums\n*** End Patch\n"},
        ),
        ("exec_command", {"cmd": COMMAND}),
        held=True,
        remark="writes with apply_patch, held to Codex's own grammar",
    ),
    "opencode": Program(
        "opencode-ai",
        "opencode",
        ("opencode", "run", "--model", "sealring/{model}", "{prompt}"),
        ("opencode", "run", "--continue", "--model", "sealring/{model}", "{prompt}"),
        ("read", {"filePath": "{path}"}),
        ("write", {"content": WRITTEN, "filePath": "{path}"}),
        ("bash", {"command": COMMAND}),
    ),
    "qwen-code": Program(
        "@qwen-code/qwen-code",
        "qwen-code",
        ("qwen", "--yolo", "{prompt}"),
        ("qwen", "--yolo", "--continue", "{prompt}"),
        ("read_file", {"file_path": "{path}"}),
        ("write_file", {"file_path": "{path}", "content": WRITTEN}),
        ("run_shell_command", {"command": f"{COMMAND}; sleep 1", "is_background": False}),
        remark="on a busy machine it may lose what a command prints just before it ends",
        environment={"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
    ),
    "cline": Program(
        "cline",
        "cline CLI",
        ("cline", "{prompt}"),
        ("cline", "{prompt}"),  # it continues a session only in a terminal
        ("read_files", {"files": [{"path": "{path}"}]}),
        ("editor", {"path": "{path}", "new_text": WRITTEN}),
        ("run_commands", {"commands": [COMMAND]}),
        remark="continues a session only in a terminal: the second question is a new session",
    ),
    "continue": Program(
        "@continuedev/cli",
        "Continue CLI",
        (*_CONTINUE, "{prompt}"),
        (*_CONTINUE, "--resume", "{prompt}"),
        ("Read", {"filepath": "{path}"}),
        ("Write", {"filepath": "{path}", "content": WRITTEN}),
        ("Bash", {"command": COMMAND}),
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "pi": Program(
        "@mariozechner/pi-coding-agent",
        "pi",
        ("pi", "-p", "--model", "sealring/{model}", "{prompt}"),
        ("pi", "-p", "-c", "--model", "sealring/{model}", "{prompt}"),
        ("read", {"path": "{path}"}),
        ("write", {"path": "{path}", "content": WRITTEN}),
        ("bash", {"command": COMMAND}),
        environment={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    ),
}


SURVIVORS = ("claude", "codex", "opencode")
"""Programs of which a session is disturbed: one for each API, and one that asks through the Vercel AI SDK."""

BREAKS = ("member", "coordinator", "gateway")
"""What is killed in the middle of an answer, and started again."""

OPEN_WEBUI = "open-webui"

HABITS = {
    "claude.names": "`--model` with haiku, sonnet, opus, fable, default, sonnet[1m] and makers' names",
    "claude.two": "a subagent on the small model",
    "opencode.two": "a title by the small model",
    "open-webui.full": "in a full context a title, tags and a summary are refused, and the chat goes on",
    "codex.review": "a command judged by the model (`auto_review`)",
    "openai-python.picture": "a picture in chats and Responses",
    "anthropic-python.picture": "a picture in Messages",
    "ollama-python.picture": "a picture in chats and `generate`",
    "openai-node.picture": "a picture in chats and Responses",
    "anthropic-node.picture": "a picture in Messages",
    "ollama-node.picture": "a picture in chats and `generate`",
    "claude.picture": "a picture that its Read tool has read",
    "codex.picture": "a picture that its `view_image` has read",
    "open-webui.picture": "a picture that its page has uploaded for a chat",
}
"""What programs do beside a session, by program."""

SMALL = "The small one says hello."
"""The small model's answer, where two are served."""

REVIEW_CUE = "APPROVAL REQUEST START"
"""In the question by which Codex has a command judged."""

OPENCODE_CUE = "Generate a title for this conversation"
TITLE_CUE, TAGS_CUE = "a concise title", "broad tags"
"""In the questions that Open WebUI asks about a conversation by itself."""

LOADS = {
    "guidellm": ("guidellm", "GuideLLM {}"),
    "aiperf": ("aiperf", "aiperf {}, chats"),
    "aiperf-completions": ("aiperf", "aiperf {}, completions"),
    "aiperf-free": ("aiperf", "aiperf {}, chats that end by themselves"),
    "vllm-completions": ("vllm", "vLLM {}, `bench serve`, completions"),
    "vllm-chat": ("vllm", "vLLM {}, `bench serve`, chats"),
    "llama-benchy": ("llama-benchy", "llama-benchy {}"),
}
"""Tools that measure: the package and the title of each, with a place for the version."""

CAPITAL = Scene("the capital of France", "", [Step("That is Paris, in France.")])
"""What llama-benchy asks before it measures."""

WEATHER = "It is 21 degrees and sunny in Paris."


@dataclass(frozen=True)
class Kit:
    """SDKs for Node, which hold a number of conversations of tests/clients/conversations.mjs."""

    packages: Sequence[str]
    title: str
    conversations: int
    tools: str


KITS = {
    "openai-node": Kit(["openai"], "openai for Node", 3, "chats, Responses, runTools"),
    "anthropic-node": Kit(["@anthropic-ai/sdk"], "anthropic for Node", 1, "messages, counting"),
    "ollama-node": Kit(["ollama"], "ollama for Node", 1, "chat"),
    "vercel-ai": Kit(
        ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"],
        "Vercel AI SDK",
        8,
        "generateText and streamText, by chats, Responses and Messages",
    ),
    "langchain-js": Kit(
        ["@langchain/openai", "@langchain/anthropic", "@langchain/ollama", "@langchain/core"],
        "LangChain JS",
        4,
        "chats, Responses, Messages, Ollama",
    ),
}


MAKERS = ("openai", "anthropic", "ollama")
"""SDKs for Python and Node, of those who made the APIs."""


def weather_scene(name: str) -> Scene:
    """What the model says to a kit."""
    call = Call("get_weather", {"city": "Paris"})
    return Scene(cue(name, 1), "get_weather", [Step(call), Step(WEATHER, after="21 degrees")])


def scenes(name: str, work: Path) -> list[Scene]:
    """What the model says to a program that works in a folder."""
    program = PROGRAMS[name]
    if not program.read[0]:
        written = f"list.txt\n```\n{WRITTEN}```\n"
        return [
            Scene(cue(name, 1), "", [Step(FOUND, after="three plums")]),
            Scene(cue(name, 2), "", [Step(written), Step(ENDED, after="THREE PLUMS")]),
        ]

    def call(tool: tuple[str, Mapping[str, Any]], file: str) -> Call:
        return Call(tool[0], _filled(tool[1], {"path": str(work / file)}), program.held)

    return [
        Scene(
            cue(name, 1),
            program.read[0],
            [Step(["I look into them.", call(program.read, "notes.txt")]), Step(FOUND, after="three plums")],
        ),
        Scene(
            cue(name, 2),
            program.run[0],
            [
                Step(call(program.write, "list.txt")),
                Step(["Now the check.", call(program.run, "list.txt")]),
                Step(ENDED, after="THREE PLUMS"),
            ],
        ),
    ]


def long_scenes(name: str, work: Path) -> list[Scene]:
    """The model's turns in a session that is disturbed: first it reads a file, then it answers LONG."""
    (read, _), (written, check, ended) = (scene.steps for scene in scenes(name, work))
    return [
        Scene(cue(name, 3), PROGRAMS[name].read[0], [read, Step(LONG, after="three plums")]),
        Scene(cue(name, 4), PROGRAMS[name].run[0], [written, check, ended]),
    ]


def model_scenes() -> list[Scene]:
    """The model's answers to a program that names models, or has a command judged."""
    helper = {
        "description": "Look",
        "prompt": f"{cue('claude', 7)}, please.",
        "subagent_type": "general-purpose",
    }
    helper |= {"model": "haiku", "run_in_background": False}
    outside = {
        "cmd": "cat notes.txt",
        "sandbox_permissions": "require_escalated",
        "justification": "To read.",
    }
    return [
        Scene(cue("claude", 5), "Read", [Step(FOUND)]),
        Scene(cue("claude", 6), "Agent", [Step(["I ask.", Call("Agent", helper)]), Step(ENDED, after=SMALL)]),
        Scene(
            cue("codex", 5),
            "apply_patch",
            [Step(["I try.", Call("exec_command", outside, whole=True)]), Step(FOUND, after="three plums")],
        ),
        Scene(REVIEW_CUE, "view_image", [Step(Whole('{"risk_level": "low", "outcome": "allow"}'))]),
    ]


LOOKS = {"claude": ("Read", {"file_path": "{path}"}), "codex": ("view_image", {"path": "{path}"})}
"""The tools by which programs look at a picture."""

PICTURE = "picture.png"


def picture_scenes(name: str, work: Path) -> list[Scene]:
    """The answers of a model that sees to a program that looks at PICTURE in a folder."""
    tool, arguments = LOOKS[name]
    look = Call(tool, _filled(arguments, {"path": str(work / PICTURE)}), PROGRAMS[name].held)
    return [Scene(cue(name, 8), tool, [Step(["I look at it.", look]), Step(LOOK)])]


EDITED = "The code is mended."
CODE = "code.py"
OLD = "        return a\n"
NEW = '    return f"<null> & {a}"\n\n'
BEFORE = f"def size(a):\n    if a < 0:\n        a = -a\n{OLD}"
AFTER = BEFORE.replace(OLD, NEW)
"""Texts that have lost their indentation or their last lines make another file."""

EDITS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "claude": ("Edit", {"file_path": "{path}", "old_string": OLD, "new_string": NEW}),
    "opencode": ("edit", {"filePath": "{path}", "oldString": OLD, "newString": NEW}),
    "qwen-code": ("edit", {"file_path": "{path}", "old_string": OLD, "new_string": NEW}),
    "cline": ("editor", {"path": "{path}", "old_text": OLD, "new_text": NEW}),
    "continue": ("Edit", {"file_path": "{path}", "old_string": OLD, "new_string": NEW}),
    "pi": ("edit", {"path": "{path}", "edits": [{"oldText": OLD, "newText": NEW}]}),
}
"""The tools by which programs change a part of a file. Codex and aider have none."""


def edit_scenes(name: str, work: Path) -> list[Scene]:
    """What the model says to a program that changes CODE in a folder. Some must read it before."""
    read, edit = (
        Call(tool, _filled(arguments, {"path": str(work / CODE)}))
        for tool, arguments in (PROGRAMS[name].read, EDITS[name])
    )
    steps = [Step(["I look at it.", read]), Step(edit, after="def size"), Step(EDITED)]
    return [Scene(cue(name, 9), edit.name, steps)]


def small_scenes() -> list[Scene]:
    """What the small model says beside the other."""
    return [Scene(cue("claude", 7), "Read", [Step(SMALL)]), Scene(OPENCODE_CUE, "", [Step(SMALL)])]


def open_webui_scenes() -> list[Scene]:
    """What the model says to Open WebUI, whose own tools find and write notes."""
    find, name = "search_notes", OPEN_WEBUI
    return [
        Scene(
            cue(name, 1),
            find,
            [Step(["I look into them.", Call(find, {"query": "plums"})]), Step(FOUND, after="three plums")],
        ),
        Scene(
            cue(name, 2),
            find,
            [
                Step(Call("write_note", {"title": "A list of plums", "content": WRITTEN})),
                Step(["Now the check.", Call(find, {"query": "list"})]),
                Step(ENDED, after="A list of plums"),
            ],
        ),
        Scene(cue(name, 3), "", [Step(FOUND)]),
        Scene(TITLE_CUE, "", [Step('{"title": "Three plums"}')]),
        Scene(TAGS_CUE, "", [Step('{"tags": ["plums", "lists"]}')]),
    ]


def full_scenes() -> list[Scene]:
    """What a model with a small context says to Open WebUI."""
    return [
        Scene(cue(OPEN_WEBUI, 4), "", [Step(FOUND)]),
        Scene(cue(OPEN_WEBUI, 5), "", [Step(ENDED)]),
        Scene(TITLE_CUE, "", [Step('{"title": "Three plums"}')]),
        Scene(TAGS_CUE, "", [Step('{"tags": ["plums", "lists"]}')]),
    ]


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), value)
    if isinstance(value, list):
        return [_filled(one, names) for one in value]
    if isinstance(value, Mapping):
        return {name: _filled(one, names) for name, one in value.items()}
    return value


def command(words: Sequence[str], **names: str) -> list[str]:
    """The words with what stands for the names in braces."""
    return [_filled(word, names) for word in words]


def versions() -> dict[str, str]:
    """By package."""
    # npm's come last: some of their packages have the names of others in Python
    lists = [(LIST.parent / f"{name}.txt").read_text().replace("==", "@") for name in BESIDE]
    lines = [line for one in (*lists, LIST.read_text()) for line in one.split()]
    pins = (line.partition(";")[0].rpartition("@") for line in lines)
    return {name: version for name, _, version in pins}


def is_installed(program: Program) -> bool:
    """Whether its command is there."""
    return shutil.which(program.first[0], path=environment(Path(), {})["PATH"]) is not None


def environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """A program's variables: an empty home, no telemetry, updates or proxy, nothing else of this process."""
    modules = INSTALLED / "node_modules"
    beside = [INSTALLED / name / "bin" for name in BESIDE]
    folders = [modules / ".bin", *modules.glob("node-*-*/bin"), *beside]
    return {
        "HOME": str(home),
        "PATH": ":".join([*map(str, folders), "/usr/bin", "/bin"]),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "1",
        "NO_PROXY": "*",
        "DO_NOT_TRACK": "1",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        **extra,
    }


@contextmanager
def note(name: str, way: str) -> Iterator[dict[str, str]]:
    """Keeps what came of a program for the table in docs/clients.md; a failure with its last line."""
    row = {"tools": "", "miss": ""}
    try:
        yield row
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        row["miss"] = (lines[0] if lines else type(error).__name__)[:200]
        raise
    finally:
        file = INSTALLED / "rows" / f"{name}.{way}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row))
