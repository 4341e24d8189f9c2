"""What a model's answer consists of: reasoning, text and tool calls, told apart while it comes.

A marker that is a special token in the vocabulary counts only as that token, so that no text can forge it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text.calls import calls_of, read_calls
from sealring.node.engine.text.detokenizer import Detokenizer, StopStrings
from sealring.node.engine.text.families import family_of, thinking_of
from sealring.node.engine.text.notations.notation import (
    CLOSE,
    LONGEST,
    NOTATIONS,
    OPEN,
    Notation,
    Objects,
    spelt,
    unmarked,
)
from sealring.node.engine.text.notations.reading import Alone, Ending, reader_of
from sealring.node.engine.text.notations.values import Raw, Written
from sealring.node.engine.text.shapes import parameters
from sealring.v1 import inference_pb2 as inference

_NAMED = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}")
_CALLED = re.compile(r"to=(functions\.)?([A-Za-z0-9_.-]+)")
_HEADERS = (OPEN, "<|", "to=", " to=")
"""What the header of an answer's first message begins with."""


def _one_of(*words: str) -> str:
    """Matches each word, and at the end of the text what begins one."""
    begun = (word[:length] for word in words for length in range(len(word) - 1, 0, -1))
    return rf"(?:{'|'.join(words)}|(?:{'|'.join(begun)})\Z)"


_AFTER = {
    "end": "",
    "eom": "",
    "start": _one_of("assistant"),
    "channel": _one_of("analysis", "commentary", "final"),
    "constrain": r"\w+",
}
"""What stands behind each mark of a header."""

_MARKED = "|".join(rf"{OPEN}?<\|{mark}\|>{CLOSE}?(?:\s*{word})?" for mark, word in _AFTER.items())
_MARKS = re.compile(rf"(?:\s*(?:{_MARKED}))*")
_HEADER = re.compile(
    rf"(?:\s*(?:{_MARKED}|to=[\w.-]*))*(?:\s+{_one_of('json', 'code')}(?=\s*\Z)|\s*(?:to?)\Z)?\s*"
)
"""What a message's header may consist of, whole or so far."""


@dataclass(frozen=True)
class Delimiters:
    """How one model marks reasoning and calls: the beginning and the end of each. A call may have no end."""

    thinking: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    name: str = ""
    """The notation's, in node.engine.text.notations."""
    final: str = ""
    """The header of a message that is text, where answers are of messages (Harmony)."""

    def __bool__(self) -> bool:
        return self.thinking is not None or self.call is not None


def format_of(source: str, vocabulary: Collection[str], parser: str = "", kind: str = "") -> Delimiters:
    """The format of a model, of which the arguments are those of `family_of`."""
    family = family_of(source, vocabulary, parser, kind)
    notation = NOTATIONS.get(family.notation)
    call = None if notation is None else (notation.begin, notation.end)
    return Delimiters(thinking_of(family, vocabulary), call, family.notation, family.final)


class SpeltDetokenizer:
    """Names special tokens, between marks, for the parser."""

    def __init__(self, detokenizer: Detokenizer, special: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._special = special

    def add(self, token: int) -> str:
        if (name := self._special.get(token)) is None:
            return self._detokenizer.add(token)
        return f"{self._detokenizer.flush()}{self._detokenizer.add(token)}{OPEN}{name}{CLOSE}"

    def flush(self) -> str:
        return self._detokenizer.flush()


class Sections:
    """The sections of one answer. `special` names the special tokens; the prompt ends with `prompt_end`.
    No JSON is a call of an answer that is `held` to a schema.

    `stops` look at the text alone, and at what stands between thoughts and calls by itself. Text that is held
    back is sent before a thought or a call.

    A call is text until it is read, and goes back to where it stood: thoughts go on behind a call in them.
    """

    def __init__(
        self,
        form: Delimiters,
        special: Collection[str],
        chat: inference.Chat,
        prompt_end: str = "",
        stops: StopStrings | None = None,
        *,
        held: bool = False,
    ) -> None:
        self._stops = stops or StopStrings(())
        self._schemas = {tool.name: parameters(tool) for tool in chat.tools}
        self._one_call = chat.one_call
        self._strict = any(tool.strict for tool in chat.tools)  # a grammar holds what `begin` begins, alone
        self._may_start = not (held or self._strict or chat.begun)
        self._form, self._special = form, frozenset(special)
        self._state, self._back, self._held = "text", "text", ""
        self._header = self._called = ""
        self._begins = self._stray = False
        self._first = self._new_line = True
        self.over = False
        """Whether the answer has had its one call."""

        self._finish: inference.FinishReason.ValueType = inference.FINISH_REASON_UNSPECIFIED
        self._content: list[str] = []
        self._begun, self._sure, self._given_up = "", False, 0
        self._ending: Ending | Alone | None = None
        calls = form.call if chat.tools else None
        self._reader = None
        if calls is not None and form.name in NOTATIONS and form.name != "harmony":
            self._reader = reader_of(form.name, self._special)
        self._edges = self._edges_of(form)
        begin, end = form.thinking or ("", "")
        if form.final:
            self._state = "header"
            self._header = calls[0] if calls and chat.call_required and self._reader is None else ""
        elif begin and prompt_end.rfind(begin) > prompt_end.rfind(end):
            self._state, self._begins = "reasoning", True
        if calls and chat.call_required and self._reader is not None:
            self._state = "text"
            self._begin_call(self._reader.begin, "call")

    def _edges_of(self, form: Delimiters) -> dict[str, dict[str, str]]:
        """What may follow in each state: markers, and the states to which they lead."""
        begin, end = form.thinking or ("", "")
        edges = {"text": [(begin, "reasoning")], "reasoning": [(end, "text")]}
        if form.final:
            marks = ("<|start|>", "<|channel|>", "<|end|>", "<|eom|>")
            header = [(mark, "header") for mark in marks]
            edges = dict.fromkeys(("text", "reasoning", "call"), header)
            edges["header"] = [("<|message|>", "")]
        found = {
            state: {spelt(marker, self._special): after for marker, after in marks if marker}
            for state, marks in edges.items()
        }
        if self._reader is not None:
            call = {self._reader.begin: "call"}
            bare = {self._reader.bare: "bare"} if self._reader.bare and not self._strict else {}
            found["text"] = {**call, **bare, **found["text"]}
            found["reasoning"] = {**({} if self._strict else call), **found["reasoning"]}
        return found

    def take(
        self, text: str, finish: inference.FinishReason.ValueType
    ) -> tuple[str, inference.Parsed | None]:
        """The text that may be sent now, and what else there is. `finish` is set with the last piece."""
        self._held += text
        self._finish = finish
        parsed, told = inference.Parsed(), ""
        if self._form.final and self._first and self._held:
            if not self._finish and any(one.startswith(self._held) and one != self._held for one in _HEADERS):
                return "", None
            self._first = False
            if self._state == "header" and not self._header and not self._held.startswith(_HEADERS):
                self._state = "text"
        while not (self.over or self._stops.stopped):
            if self._state == "call" and self._reader is not None:
                more, found = self._go_on(parsed)
            else:
                more, found = self._pass_on(parsed)
            told += found
            if not more:
                break
        if self._finish or self.over:
            told += self._stops.flush()
        return told, parsed if parsed.reasoning or parsed.tool_calls else None

    def _pass_on(self, parsed: inference.Parsed) -> tuple[bool, str]:
        """Tells what stands before the next marker; whether there is more to do, and the text."""
        if self._stray and self._waits_for_stray():
            return False, ""
        start, marker = self._next(final=bool(self._finish))
        piece, self._held = self._held[:start], self._held[start + len(marker) :]
        told = self._tell(piece, parsed)
        if self._stops.stopped:
            return False, told
        if self._state == "header" and self._is_no_header(marker):
            return True, told
        if self._state == "call" and (marker or self._finish):
            told += self._close_message(parsed, cut=not marker)
        if marker:
            self._pass(marker)
        return bool(marker), told

    def _waits_for_stray(self) -> bool:
        """Leaves out the end of calls behind a call that had no beginning. Whether it may still come."""
        assert self._reader is not None
        held, end = self._held.lstrip(), self._reader.end
        if end and held.startswith(end):
            self._held = held[len(end) :]
        elif end and end.startswith(held) and not self._finish:
            return True
        self._stray = False
        return False

    def _is_no_header(self, marker: str) -> bool:
        """Goes on in a message whose header is none: what follows its marks is what the model says."""
        header = self._header
        if not header or (_HEADER.fullmatch(header) and (marker or not self._finish or "<|" in header)):
            return False
        marks = _MARKS.match(header)
        self._header = header[: marks.end()] if marks is not None else ""
        self._held = header[len(self._header) :] + marker + self._held
        self._begin_message()
        return True

    def _begin_message(self) -> None:
        tools = self._schemas if self._reader is None else ()  # else a call has marks of its own
        self._state, self._called = section_of(unmarked(self._header), tools)
        self._header, self._begins, self._new_line = "", True, True

    def _pass(self, marker: str) -> None:
        after = self._edges[self._state].get(marker, "start")
        if after in ("call", "bare", "start"):
            self._begin_call(marker, after)
            return
        if self._state == "header":
            self._begin_message()
            return
        if after == "header":
            self._header = marker
        self._state, self._begins, self._new_line = after, True, True

    def _next(self, *, final: bool) -> tuple[int, str]:
        """The end of the text that may be sent, and the marker there, if it is whole."""
        held, edges = self._held, self._edges[self._state]
        if self._first and self._may_start and self._state == "text" and (said := held.lstrip()):
            starts = self._starts(said)
            if starts or (starts is None and not final):
                return len(held) - len(said), said[0] if starts else ""
        for found in _any_of(tuple(edges)).finditer(held):
            if edges[found[0]] != "reasoning" or OPEN in found[0] or self._on_new_line(held, found.start()):
                return found.start(), found[0]
        if final:
            return len(held), ""
        opened = held.rfind(OPEN)
        end = len(held) if held.find(CLOSE, opened) >= opened else opened
        longest = max(map(len, edges), default=0)
        for start in range(max(0, len(held) - longest + 1), end):
            if any(marker.startswith(held[start:]) for marker in edges):
                return start, ""
        return end, ""

    def _starts(self, said: str) -> bool | None:
        """Whether a call without a marker begins an answer; None where that is not known yet."""
        if self._reader is not None and _alone(self._reader.notation):
            return Alone.begins(said, self._schemas)
        return self._reader is not None and said.startswith(self._reader.notation.starts or "\0")

    def _on_new_line(self, held: str, at: int) -> bool:
        before = _NAMED.sub("", held[max(0, at - LONGEST) : at]).rstrip(" \t")
        return before.endswith("\n") or (not before and at < LONGEST and self._new_line)

    def _tell(self, piece: str, parsed: inference.Parsed) -> str:
        if self._state == "call":
            self._content.append(unmarked(piece))
            return ""
        if self._state == "header":
            self._header += piece
            return ""
        text = unmarked(_NAMED.sub("", piece))
        if self._begins:  # models set markers on lines of their own
            text = text.lstrip("\n")
            self._begins = not text
        return self._say(text, parsed)

    def _say(self, text: str, parsed: inference.Parsed) -> str:
        """The part of a text that may be sent, to where it belongs."""
        if self._state == "reasoning":
            parsed.reasoning += text
            return self._stops.flush() if text else ""
        self._first = self._first and (not text or text.isspace())
        if ended := text.rstrip(" \t"):
            self._new_line = ended.endswith("\n")
        return self._stops.add(text)

    def _begin_call(self, marker: str, kind: str) -> None:
        assert self._reader is not None
        self._back, self._state, self._begun = self._state, "call", marker
        self._content = [] if kind == "call" else [marker]
        self._first = self._first and self._back != "text"
        over = spelt(self._form.thinking[1], self._special) if self._form.thinking else ""
        self._sure = kind == "start" and _alone(self._reader.notation)
        self._ending = (
            Alone(marker)
            if self._sure
            else Ending(self._reader, bare=kind == "bare", over=over if self._back == "reasoning" else "")
        )

    def _go_on(self, parsed: inference.Parsed) -> tuple[bool, str]:
        """Goes on in a call; whether there is more to do, and the text."""
        assert self._reader is not None
        assert self._ending is not None
        cut, found = self._ending.find(self._held)
        if found is None and self._finish:
            cut = len(self._held)
        if not self._sure:
            start = "".join([*self._content, self._held[:cut] if found else self._held])
            if not self._reader.begins(start):
                return True, self._give_up(parsed, "", whole=False)
            self._sure = len(start) > LONGEST
        self._content.append(self._held[:cut])
        marker, kind = (found[0], found.lastgroup) if found is not None else ("", "")
        self._held = self._held[cut:]
        if not kind and not self._finish:
            return False, ""
        if kind == "over":
            return True, self._give_up(parsed, "")
        self._held = self._held[len(marker) :]
        calls = None
        if kind or self._finish != inference.FINISH_REASON_LENGTH:
            reader = self._ending if isinstance(self._ending, Alone) else self._reader
            calls = read_calls(reader, "".join(self._content), self._schemas)
            if calls and self._begun in self._reader.notation.starts:  # JSON with a name may be the answer
                calls = calls if all(call.name in self._schemas for call in calls) else None
        if calls is None:
            return True, self._give_up(parsed, marker if kind == "end" else "", again=kind == "again")
        self.over = self._one_call
        bare, self._state = self._begun == self._reader.bare, self._back
        self._begins = self._new_line = True
        self._stray = bare and kind != "again"
        parsed.tool_calls.extend(calls[:1] if self._one_call else calls)
        if kind == "again":
            self._begin_call(marker, "call")
        return True, self._stops.flush()

    def _give_up(self, parsed: inference.Parsed, end: str, *, whole: bool = True, again: bool = False) -> str:
        """Makes text of a call that cannot be read, as it was written: all of it, or its beginning alone."""
        assert self._reader is not None
        self._state = self._back
        content, self._content = "".join(self._content), []
        if not content.startswith(self._begun):
            content = self._begun + content
        inner = any(mark and mark in content[len(self._begun) :] for mark in self._edges[self._state])
        self._given_up += 1
        if not whole or (inner and not end and not again and self._given_up < MOST_GIVEN_UP):
            content, self._held = self._begun, content[len(self._begun) :] + self._held
        else:
            self.over = self._one_call
        self._begins = False
        told = self._say(unmarked(content + end), parsed)
        if again:
            self._begin_call(self._reader.begin, "call")
        return told

    def _close_message(self, parsed: inference.Parsed, *, cut: bool) -> str:
        """Ends a message that is a call."""
        text, self._content, self._state = "".join(self._content), [], "text"
        self.over = self._one_call
        found = Written(self._called, text)
        calls = None
        if not cut or self._finish != inference.FINISH_REASON_LENGTH:
            calls = calls_of([found], self._schemas)
            if calls is None and (key := _only_text(self._schemas.get(self._called, {}))):
                calls = calls_of([Written(self._called, {key: Raw(text, "string")})], self._schemas)
        if calls is None:
            return self._say(text, parsed)
        parsed.tool_calls.extend(calls)
        return self._stops.flush()


def _alone(notation: Notation) -> bool:
    return isinstance(notation, Objects) and notation.alone


MOST_GIVEN_UP = 32
"""Calls without an end that are looked through for others: each look takes time in proportion to its text."""


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"\Z.")


def _only_text(schema: Mapping[str, Any]) -> str:
    """The name of a tool's one argument, if that is a text."""
    found = schema.get("properties")
    items = list(found.items()) if isinstance(found, dict) else []
    text = len(items) == 1 and isinstance(items[0][1], dict) and items[0][1].get("type") == "string"
    return items[0][0] if text else ""


def section_of(header: str, schemas: Collection[str]) -> tuple[str, str]:
    """The kind of a message with this header, and the name of the tool that it calls."""
    called = _CALLED.search(header)
    if called is not None and called[2] == "self":
        return "reasoning", ""
    if called is not None and schemas and (called[1] or called[2] in schemas):
        return "call", called[2]
    return ("reasoning" if "<|channel|>analysis" in header else "text"), ""


def no_tool_calls() -> InvalidInput:
    """The error for who demands a call of a model whose calls nobody can read."""
    return InvalidInput(
        "this model cannot be made to call a tool",
        hint='leave tool_choice at "auto"',
        reason="NO_TOOL_CALLS",
        param="tool_choice",
    )
