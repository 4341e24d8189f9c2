"""What an answer is held to: a grammar of a request's schema, its strict tools and the calls it requires.

Lark in llguidance's dialect (its docs/syntax.md). What a model thinks stays free, and so does text beside
calls. A marker that is a special token is that token in the grammar, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import check_schema, parse_json_object
from sealring.node.engine.text.notations.notation import NOTATIONS, Flat, Headed, Objects, Pieces
from sealring.node.engine.text.piecewise import BREAK, Arguments, as_json
from sealring.node.engine.text.schemas import closed
from sealring.node.engine.text.sections import Delimiters
from sealring.node.engine.text.shapes import parameters
from sealring.node.engine.text.thinking import Budget
from sealring.v1 import inference_pb2 as inference

_ANYTHING = {"type": "object"}


def may_be_held(chat: inference.Chat) -> frozenset[int]:
    """The places of tools whose arguments a required call is held to, though they are not strict: a client
    that forces a call reads an object of that schema from it. Schemas that no strict tool may have are left
    out.
    """
    found = set[int]()
    if chat.call_required:
        for place, tool in enumerate(chat.tools):
            with contextlib.suppress(InvalidInput):
                check_schema(tool.parameters, "tools")
                if tool.parameters and not tool.strict:
                    found.add(place)
    return frozenset(found)


def grammar_of(
    prompt: inference.Prompt,
    form: Delimiters,
    special: Callable[[], Mapping[int, str]],
    said: str,
    held: frozenset[int] = frozenset(),
    silent: Container[int] = (),
    budget: Budget | None = None,
) -> str:
    """The grammar of the answer to a prompt whose last turn is `said` so far; empty where it is free.
    `special` gives the tokens that a grammar matches as tokens and never as text, by their names; `silent`
    are those of them that have no text in an answer either. `held` are the places of tools that are as if
    they were strict.

    Raises InvalidInput (NO_STRICT_TOOLS) where calls are to be held to a schema and how the model writes them
    is not known.
    """
    chat = prompt.chat
    calls = form.call is not None and bool(chat.tools)
    strict = calls and (bool(held) or any(tool.strict for tool in chat.tools))
    notation = NOTATIONS.get(form.name)
    known = isinstance(notation, Objects | Headed | Pieces | Flat)
    bare = notation is not None and notation.starts and not chat.call_required
    if strict and (not known or bare):  # nothing says where a call begins that is all of an answer
        raise InvalidInput(
            "this model's tool calls cannot be held to a schema",
            hint="leave strict out of the tools, and grammars out of custom ones",
            reason="NO_STRICT_TOOLS",
            param="tools",
        )
    required = calls and chat.call_required
    if prompt.schema or strict or (required and known):
        return _Writer(form, special(), chat, held, silent, budget).grammar(prompt, said, calls=calls)
    if budget is None or required or form.thinking is None:
        return ""
    begin, end = form.thinking
    return budget.grammar(thinks=said.rfind(begin) > said.rfind(end))


class _Writer:
    """Writes one grammar, rule by rule."""

    def __init__(
        self,
        form: Delimiters,
        special: Mapping[int, str],
        chat: inference.Chat,
        held: frozenset[int],
        silent: Container[int],
        budget: Budget | None,
    ) -> None:
        self._form = form
        self._budget = budget
        self._strict = [tool.strict or place in held for place, tool in enumerate(chat.tools)]
        self._special = {name: token for token, name in special.items()}
        self._names = re.compile(
            "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"\Z."
        )
        self._spelt = {name for name, token in self._special.items() if token not in silent}
        self._chat = chat
        self._rules = ["FREE: /(?s:.*)/", "SPACE: /[ \\n]{1,4}/", "BREAKS: /\\n{1,4}/"]

    def grammar(self, prompt: inference.Prompt, said: str, *, calls: bool) -> str:
        final = self._literal(self._form.final)
        if calls and self._chat.call_required:  # the prompt ends with the call's beginning
            start = "rest_of_call" if self._chat.one_call else "rest_of_call (SPACE? call)*"
            self._add_calls()
        elif prompt.schema:
            start = f"{self._thoughts(said, held=True)} answer"
            self._rules.append(f"answer: schema{' | call (SPACE? call)*' if calls else ''}")
            self._rules.append(
                f"schema: {final} {as_json(closed(parse_json_object(prompt.schema, 'response_format')))}"
            )
            if calls:
                self._add_calls()
        elif final:
            start = f"{self._thoughts(said)} (call | {final} FREE)"
            self._add_calls()
        else:
            assert self._form.call is not None
            start = f"{self._thoughts(said)} (called rest_of_call)* FREE"
            self._add_up_to("called", self._form.call[0])
            self._add_calls()
        return "\n".join([f"start: {start}", *self._rules])

    def _thoughts(self, said: str, *, held: bool = False) -> str:
        """The rest of the thoughts if the model is thinking already; else it may think first. With `held`
        line breaks may follow, which no answer has."""
        if self._form.thinking is None:
            return ""
        begin, end = self._form.thinking
        if self._budget is not None:
            self._rules.append(self._budget.rule())
        else:
            self._add_up_to("thought", end)
        thought = "thought BREAKS?" if held else "thought"
        if said.rfind(begin) > said.rfind(end):
            return thought
        return f"({'' if held else 'SPACE?'} {self._literal(begin)} {thought})?"

    def _add_up_to(self, rule: str, marker: str) -> None:
        """Adds a rule for free text and the marker that ends it: a token, and spelt out where that counts."""
        lazy = f"[lazy]: /(?s:.*)/ {json.dumps(marker, ensure_ascii=False)}"
        name = self._names.search(marker)
        if name is None:
            self._rules.append(f"{rule}{lazy}")
        elif name[0] in self._spelt:
            self._rules += [f"{rule}: FREE {self._literal(marker)} | {rule}_spelt", f"{rule}_spelt{lazy}"]
        else:
            self._rules.append(f"{rule}: FREE {self._literal(marker)}")

    def _add_calls(self) -> None:
        assert self._form.call is not None
        begin, end = self._form.call
        notation = NOTATIONS.get(self._form.name)
        if isinstance(notation, Objects | Headed):
            self._add_json(notation, end)
        elif isinstance(notation, Pieces | Flat):
            self._add_pieces(notation, end)
        elif end:
            self._add_up_to("rest_of_call", end)
        else:
            self._rules.append("rest_of_call: FREE")
        self._rules.append(f"call: {self._literal(begin)} rest_of_call")

    def _schema(self, index: int) -> dict[str, Any]:
        """The schema of a tool's arguments, or what they are at least."""
        schema = closed(parameters(self._chat.tools[index]), tool=True)
        held = self._strict[index] or not schema.get("properties")
        return {"type": "object", **schema} if held else _ANYTHING

    def _add_json(self, notation: Objects | Headed, end: str) -> None:
        """Calls whose arguments are one object of JSON."""
        before, after = notation.call, notation.call_end
        if isinstance(notation, Headed) and notation.held is not None:
            before, after = notation.held
        kinds = []
        for index, tool in enumerate(self._chat.tools):
            begins = f" /{notation.number}/ ".join(map(self._literal, (before % tool.name).split("#")))
            self._rules.append(
                f"tool_{index}: {begins} {as_json(self._schema(index))} {self._literal(after)}"
            )
            kinds.append(f"tool_{index}")
        one = "(" + " | ".join(kinds) + ")"
        body = f"{one} (SPACE? {one})*" if notation.several and not self._chat.one_call else one
        self._rules.append(f"rest_of_call: {body} {self._literal(end)}")

    def _add_pieces(self, notation: Pieces | Flat, end: str) -> None:
        """Calls whose arguments are written one by one; those of tools that are not strict are free."""
        breaks = isinstance(notation, Pieces) and notation.breaks
        kinds, others = list[str](), list[str]()
        for index, tool in enumerate(self._chat.tools):
            schema = self._schema(index)
            begins = (notation.call % tool.name).replace("#", "1")
            begun = f" {BREAK} ".join(self._literal(part) for part in begins.split("\n"))
            held = schema is not _ANYTHING
            if held:
                ending = "" if self._names.search(end) else end
                made = Arguments(notation, tool.name, schema, self._literal, f"args_{index}", ending)
                rest = f"{made.body()} {self._literal(notation.call_end.strip())}"
                self._rules += made.rules
            else:
                rest = f"free_{index}"
                self._add_up_to(rest, notation.call_end.strip() or end)
            self._rules.append(f"tool_{index}: {begun} {rest} {BREAK * breaks}")
            (kinds if held or notation.call_end else others).append(f"tool_{index}")
        one = "(" + " | ".join(kinds) + ")"
        body = f"{one}+" if notation.several and not self._chat.one_call else one
        ends = [f"{body} {self._literal(end)}"] if kinds else []
        self._rules.append(f"rest_of_call: {' | '.join([*ends, *others])}")

    def _literal(self, text: str) -> str:
        """The terminals of a text with special tokens in it."""
        found, start = [], 0
        for match in self._names.finditer(text):
            found += [json.dumps(text[start : match.start()], ensure_ascii=False)] * (match.start() > start)
            found.append(f"<[{self._special[match[0]]}]>")
            start = match.end()
        if start < len(text):
            found.append(json.dumps(text[start:], ensure_ascii=False))
        return " ".join(found)
