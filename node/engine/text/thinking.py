"""How long a model thinks: the switches that its chat template has, and a budget of tokens.

A budget is a grammar of tokens: a bounded number of any but the end of thoughts, then that end. So it holds
with drafts, for each row by itself, and for an answer that goes on after a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sealring.node.engine.text.families import Pair, Switch, family_of, switches_of

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


def thought_rule(budget: int, end: int) -> str:
    """The rule of a grammar for the rest of thoughts that the token `end` ends."""
    return f"thought: {f'<[^{end}]>{{0,{budget}}} ' * (budget > 0)}<[{end}]>"


def limited(budget: int, markers: Pair, tokens: Mapping[str, int], said: str) -> str:
    """The grammar of an answer that is free but for its thoughts; empty where their marks are no tokens.

    `tokens` are by their names, and `said` is the end of the prompt.
    """
    begin, end = markers
    if end not in tokens:
        return ""
    rules = [thought_rule(budget, tokens[end]), FREE]
    if said.rfind(begin) > said.rfind(end):
        return "\n".join(["start: thought rest", *rules])
    first = next((tokens[name] for name in tokens if begin.startswith(name)), None)
    if first is None:
        return ""
    return "\n".join([f"start: (<[{first}]> thought | <[^{first}]>)? rest", *rules])


FREE = "rest: <[*]>*"
"""The last rule of a grammar that holds nothing but thoughts."""
