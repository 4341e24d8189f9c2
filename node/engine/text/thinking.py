"""How long a model thinks: the switches that its chat template has, and a budget of tokens.

A budget is a grammar of tokens, for all thoughts of an answer together. So it holds with drafts, for each row
by itself, and for an answer that goes on after a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sealring.node.engine.text.families import Switch, family_of, switches_of

_EFFORT = ("reasoning_effort", "thinking_effort", "reasoning_strength")
"""Names that templates have for how much a model thinks."""

BUDGETS = {"low": 1024, "medium": 8192}
"""Tokens of thoughts by effort, where the template does not know it."""


@dataclass(frozen=True)
class Thinking:
    """What a chat template knows of thinking: its switches, and its names for the effort."""

    switches: tuple[Switch, ...] = ()
    efforts: tuple[str, ...] = ()

    def arguments(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Variables for the template: switch and effort by all names that it knows."""
        found = dict(told)
        thinks, effort = told.get("enable_thinking"), told.get("reasoning_effort")
        if isinstance(thinks, bool):
            for switch in self.switches:
                found.setdefault(switch.name, switch.on if thinks else switch.off)
        if effort is not None:
            for name in self.efforts:
                found.setdefault(name, effort)
        return found

    def budget(self, told: Mapping[str, Any]) -> int | None:
        """The most tokens of thoughts; None for any number."""
        if told.get("enable_thinking") is False:
            return None
        asked = told.get("thinking_budget")
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
            return asked
        effort = told.get("reasoning_effort")
        return BUDGETS.get(effort) if isinstance(effort, str) and not self.efforts else None


def thinking_of_template(source: str, *of_family: Any) -> Thinking:
    """`of_family` is what `family_of` takes beside the template's source."""
    switches = switches_of(family_of(source, *of_family), source)
    return Thinking(switches, tuple(name for name in _EFFORT if name in source))


class Budget(NamedTuple):
    """The most tokens of thoughts in an answer, and the tokens of the marks around thoughts."""

    most: int
    begin: Sequence[int]
    end: Sequence[int]

    def rule(self) -> str:
        """The rule of a grammar for the rest of an answer's only thoughts, with their end."""
        return f"thought: {f'<[^{self.end[0]}]>{{0,{self.most}}} ' * (self.most > 0)}{_tokens(self.end)}"

    def grammar(self, *, thinks: bool) -> str:
        """The grammar of an answer that is free but for its thoughts, which it is in already if it `thinks`.

        Each token of thoughts may have behind it that they end and begin again. Once all are spent, the end
        is all that may follow a beginning.
        """
        first, *rest = self.begin
        parts = [_tokens(rest[:count]) for count in range(len(rest) + 1)]  # of the mark behind `first`
        texts = [f"run {parts[at]} <[^{first},{token}]>" for at, token in enumerate(rest)]
        again = [f"{part} <[{first}]>+" for part in parts[1:-1]]
        return "\n".join(
            [
                f"start: {'thoughts' if thinks else 'text (begin thoughts)?'}",
                f"thoughts: again* {f'one{{0,{self.most}}} ' * (self.most > 0)}end text (begin end text)*",
                f"one: <[^{self.end[0]}]> again*",
                f"text: ({_either([f'<[^{first}]>', *texts])})*",
                f"run: <[{first}]>{'+' * bool(rest)} {f'({_either(again)})*' * bool(again)}",
                f"begin: run {parts[-1]}",
                f"end: {_tokens(self.end)}",
                FREE,
            ]
        )


def _either(parts: Sequence[str]) -> str:
    return " | ".join(parts)


def _tokens(ids: Sequence[int]) -> str:
    return " ".join(f"<[{token}]>" for token in ids)


FREE = "again: end text begin"
"""The last rule of a grammar that holds nothing but thoughts."""
