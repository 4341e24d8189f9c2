"""The families of models: how each is recognised, how it marks thoughts, writes calls and begins to think.

One row a family. A folder is of the first row whose words are all in its chat template or, where a row has
no words, whose tokens are all in its vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

Pair = tuple[str, str]

THINK: tuple[Pair, ...] = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
"""The usual marks of thoughts: a family without marks of its own has the first pair that its vocabulary
knows."""


@dataclass(frozen=True)
class Switch:
    """A variable of the chat template that says whether the model thinks, and its value for either."""

    name: str
    on: bool | str = True
    off: bool | str = False


SWITCHES = (
    Switch("enable_thinking"),
    Switch("thinking"),
    Switch("thinking_mode", "enabled", "disabled"),
)
"""Every name that templates have for the switch."""


@dataclass(frozen=True)
class Family:
    """One row. `told` are texts that its chat template has, `tokens` those of its vocabulary."""

    name: str
    notation: str = ""
    """How it writes calls (node.engine.text.sections); empty where nobody can read them."""
    told: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    thinking: Pair | None = None
    """What it has instead of `THINK`."""
    switches: tuple[Switch, ...] = SWITCHES
    """Those of its template's variables that say whether it thinks."""
    remarks: str = ""

    def has(self, source: str, vocabulary: Collection[str]) -> bool:
        if self.told:
            return all(word in source for word in self.told)
        return bool(self.tokens) and all(token in vocabulary for token in self.tokens)


FAMILIES = (
    Family(
        "gpt-oss",
        "harmony",
        tokens=("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),
        switches=(),
        remarks="reasoning_effort is no switch: it always thinks",
    ),
    Family("minimax-m2", "minimax_m2", ("<minimax:tool_call>",)),
    Family(
        "gemma4", "gemma4", ("<|tool_call>", "<tool_call|>"), thinking=("<|channel>thought", "<channel|>")
    ),
    Family("function-gemma", "function_gemma", ("<start_function_call>",)),
    Family("longcat", "longcat", ("<longcat_tool_call>",)),
    Family("glm", "glm47", ("<arg_key>",)),
    Family("lfm2", "pythonic", ("<|tool_list_start|>",)),
    Family("lfm2.5", "pythonic", ("<|tool_call_start|>",)),
    Family("qwen3-coder", "qwen3_coder", ("<tool_call>\\n<function=",)),
    Family("qwen3-coder", "qwen3_coder", ("<tool_call>\n<function=",)),
    Family("kimi-k2", "kimi_k2", ("<|tool_calls_section_begin|>",)),
    Family("minicpm5", "minicpm5", ('<function name="', '<param name="')),
    Family("mistral", "mistral", ("[TOOL_CALLS]",)),
    Family("muse-spark", "muse_spark", ("<atem:function_calls>",)),
    Family("qwen3", "json_tools", ("<tool_call>", "tool_call.name")),
    Family("lfm2.5", "pythonic", tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("deepseek-v3", "deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    Family("deepseek-v3.1", "deepseek", ("<｜tool▁calls▁begin｜>",)),
    Family("deepseek-v3.2", "dsml", tokens=("｜DSML｜",)),
)


def family_of(source: str, vocabulary: Collection[str]) -> Family:
    """The family of a model with this chat template and these tokens; one without a name if it is of none."""
    return next((row for row in FAMILIES if row.has(source, vocabulary)), Family(""))


def thinking_of(family: Family, vocabulary: Collection[str]) -> Pair | None:
    """The marks around what a model of this family and vocabulary thinks; None if it does not think."""
    if family.thinking is not None:
        return family.thinking
    return next((pair for pair in THINK if all(mark in vocabulary for mark in pair)), None)


def switches_of(family: Family, source: str) -> tuple[Switch, ...]:
    """The switches for thinking that a model of this family has by its chat template."""
    return tuple(switch for switch in family.switches if switch.name in source)
