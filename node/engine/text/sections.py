"""What a model's answer consists of: reasoning, text and tool calls, told apart while it comes.

mlx-lm's parsers read the calls, and node.engine.text.parsers those that it has none for. Its state machine
needs transformers, and knows markers as text; here a marker that is a special token in the vocabulary counts
only as that token, so that no text can forge it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import parse_json_object
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.text.calls import calls_of
from sealring.node.engine.text.detokenizer import Detokenizer, StopStrings
from sealring.node.engine.text.parsers import HARMONY_TOKENS, deepseek_format, harmony_section
from sealring.v1 import inference_pb2 as inference

THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
_CHANNEL = ("<|channel>", "thought", "<channel|>")

_PARSERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>", "tool_call.name")),
)
"""mlx-lm's parsers by what the chat template says, as in mlx_lm.tokenizer_utils._infer_tool_parser."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around the name of a special token on its way to the parser; no characters of a text."""

_NAMED = re.compile(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}")
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")


@dataclass(frozen=True)
class Format:
    """How one model marks reasoning and calls: the beginning and the end of each. A call may have no end."""

    thinking: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    name: str = ""
    """The parser's name (node.engine.text.calls); node.engine.text.constraints finds by it how calls are
    written."""
    final: str = ""
    """The header of a message that is text, where answers are of messages (Harmony)."""

    def __bool__(self) -> bool:
        return self.thinking is not None or self.call is not None

    @property
    def parser(self) -> str:
        """The parser that reads calls; empty where the message's header and its JSON say all."""
        return "" if self.final else self.name


_HARMONY = Format(
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("<|channel|>commentary to=functions.", ""),
    name="harmony",
    final="<|channel|>final<|message|>",
)


def format_of(source: str, vocabulary: Collection[str], parser: str = "") -> Format:
    """The format by a model's chat template and its tokens; `parser` is mlx-lm's name, if the folder has
    one."""
    if vocabulary_has(vocabulary, *HARMONY_TOKENS):
        return _HARMONY
    thinking = next((pair for pair in THINKING if vocabulary_has(vocabulary, *pair)), None)
    if thinking is None and vocabulary_has(vocabulary, _CHANNEL[0], _CHANNEL[2]):
        thinking = (_CHANNEL[0] + _CHANNEL[1], _CHANNEL[2])
    found = (name for name, told in _PARSERS if all(each in source for each in told))
    name = parser or next(found, "")
    if not name and vocabulary_has(vocabulary, "<|tool_call_start|>", "<|tool_call_end|>"):
        name = "pythonic"
    if not name and (found_one := deepseek_format(source, vocabulary)) is not None:
        name, markers = found_one
        return Format(thinking, markers, name)
    if not name:
        return Format(thinking)
    mlx_lm_import.install()
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return Format(thinking, (module.tool_call_start, module.tool_call_end), name)


def vocabulary_has(vocabulary: Collection[str], *tokens: str) -> bool:
    return all(token in vocabulary for token in tokens)


class SpeltDetokenizer:
    """Names special tokens, between marks, for the parser."""

    def __init__(self, detokenizer: Detokenizer, special: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._special = special

    def add(self, token: int) -> str:
        name = self._special.get(token)
        text = self._detokenizer.add(token)
        return text if name is None else f"{text}{_OPEN}{name}{_CLOSE}"

    def flush(self) -> str:
        return self._detokenizer.flush()


class Sections:
    """The sections of one answer. `special` names the special tokens; the prompt ends with `prompt_end`.

    `stops` look at the text alone, and at what stands between thoughts and calls by itself. Text that is held
    back is sent before a thought or a call.
    """

    def __init__(
        self,
        form: Format,
        special: Collection[str],
        chat: inference.Chat,
        prompt_end: str = "",
        stops: StopStrings | None = None,
    ) -> None:
        self._stops = stops or StopStrings(())
        self.parser = form.parser
        self.tools = [
            {"type": "function", "function": {"name": one.name, "parameters": parameters(one)}}
            for one in chat.tools
        ]
        self._one_call = chat.one_call
        self._state, self._held, self._call = "text", "", ""
        self._header = self._called = ""
        self._begins = False
        self.over = False
        """Whether the answer has had its one call."""

        self.unread: str | None = None
        """The content of a call that has ended and is not read yet: `read` has to follow. What comes after
        it is held until then."""

        self._finish: inference.FinishReason.ValueType = inference.FINISH_REASON_UNSPECIFIED
        begin, end = form.thinking or ("", "")
        if form.final:
            self._state = "header"
            self._header = form.call[0] if form.call and chat.tools and chat.call_required else ""
        elif begin and prompt_end.rfind(begin) > prompt_end.rfind(end):
            self._state, self._begins = "reasoning", True
        edges = {"text": [(begin, "reasoning")], "reasoning": [(end, "text")], "call": []}
        if form.final:
            opening = [("<|start|>", "header"), ("<|channel|>", "header"), ("<|end|>", "header")]
            edges = {"header": [("<|message|>", "")], **dict.fromkeys(edges, opening)}
        elif form.call is not None and chat.tools:
            edges["text"].append((form.call[0], "call"))
            edges["reasoning"].append((form.call[0], "call"))
            edges["call"].append((form.call[1], "text"))
            if chat.call_required:
                self._state = "call"
        self._edges = {
            state: {_spelt(marker, special): after for marker, after in found if marker}
            for state, found in edges.items()
        }
        self._call_begin = form.call[0] if form.call is not None and not form.final else ""

    def take(
        self, text: str, finish: inference.FinishReason.ValueType
    ) -> tuple[str, inference.Parsed | None]:
        """The text that may be sent now, and what else there is. `finish` is set with the last piece."""
        self._held += text
        self._finish = finish
        return self._divide("", inference.Parsed())

    def read(self, calls: Sequence[inference.ToolCall] | None) -> tuple[str, inference.Parsed | None]:
        """As `take`, once it is known what the `unread` call holds. None: it cannot be read, and is text."""
        parsed, told, self.unread = inference.Parsed(), "", None
        if calls is None:
            told = self._raw()
        else:
            self._call, told = "", self._stops.flush()
            parsed.tool_calls.extend(calls[:1] if self._one_call else calls)
        return self._divide(told, parsed)

    def _divide(self, told: str, parsed: inference.Parsed) -> tuple[str, inference.Parsed | None]:
        while not self._waits():
            start, marker = self._next(final=bool(self._finish))
            piece, self._held = self._held[:start], self._held[start + len(marker) :]
            told += self._tell(piece, parsed)
            if self._stops.stopped:
                break
            called = self._state == "call" and (marker or self._finish)
            if marker:
                self._pass(marker)
            elif called:
                self._state = "text"
            if called and (marker or self._finish != inference.FINISH_REASON_LENGTH):
                told += self._close(parsed)
            elif called:
                told += self._raw()
            if not marker:
                break
        if (self._finish or self.over) and self.unread is None:
            told += self._stops.flush()
        return told, parsed if parsed.reasoning or parsed.tool_calls else None

    def _waits(self) -> bool:
        return self.over or self._stops.stopped or self.unread is not None

    def _pass(self, marker: str) -> None:
        after = self._edges[self._state][marker]
        if self._state == "header":
            after, self._called = harmony_section(self._header)
            after = "text" if after == "call" and not self.tools else after
            self._header = ""
        elif after == "header":
            self._header = _MARKS.sub("", marker)
        self._state, self._begins = after, True

    def _next(self, *, final: bool) -> tuple[int, str]:
        """The end of the text that may be sent, and the marker there, if it is whole."""
        held, edges = self._held, self._edges[self._state]
        found = [(start, marker) for marker in edges if (start := held.find(marker)) >= 0]
        if found:
            return min(found)
        if final:
            return len(held), ""
        opened = held.rfind(_OPEN)
        end = len(held) if held.find(_CLOSE, opened) >= opened else opened
        longest = max(map(len, edges), default=0)
        for start in range(max(0, len(held) - longest + 1), end):
            if any(marker.startswith(held[start:]) for marker in edges):
                return start, ""
        return end, ""

    def _tell(self, piece: str, parsed: inference.Parsed) -> str:
        if self._state == "call":
            self._call += _MARKS.sub("", piece)
            return ""
        if self._state == "header":
            self._header += _MARKS.sub("", piece)
            return ""
        text = _MARKS.sub("", _NAMED.sub("", piece))
        if self._begins:  # models set markers on lines of their own
            text = text.lstrip("\n")
            self._begins = not text
        if self._state == "reasoning":
            parsed.reasoning += text
            return self._stops.flush() if text else ""
        return self._stops.add(text)

    def _close(self, parsed: inference.Parsed) -> str:
        """Ends a call. The only one that an answer may have is the answer's end, readable or not."""
        self.over = self._one_call
        if self.parser:
            self.unread = self._call
            return ""
        try:
            calls = calls_of({"name": self._called, "arguments": self._call})
        except Exception:  # whatever a model has made up
            return self._raw()
        self._call = ""
        parsed.tool_calls.extend(inference.ToolCall(**call) for call in calls)
        return self._stops.flush()

    def _raw(self) -> str:
        call, self._call = self._call_begin + self._call, ""
        return self._stops.add(call)


def parameters(tool: inference.Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; empty where it takes none."""
    return parse_json_object(tool.parameters, "tools")


def _spelt(marker: str, special: Collection[str]) -> str:
    """A marker as it comes from SpeltDetokenizer."""
    for name in sorted(special, key=len, reverse=True):
        if name in marker:
            return marker.replace(name, f"{_OPEN}{name}{_CLOSE}")
    return marker


def no_tool_calls() -> InvalidInput:
    """The error for who demands a call of a model whose calls nobody can read."""
    return InvalidInput(
        "this model cannot be made to call a tool",
        hint='leave tool_choice at "auto"',
        reason="NO_TOOL_CALLS",
        param="tool_choice",
    )
