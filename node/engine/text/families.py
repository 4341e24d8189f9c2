"""The families of models: how each is recognised, how it marks thoughts, writes calls and begins to think.

One row a family. A folder is of the first row whose words are all in its chat template or, where a row has
no words, whose tokens are all in its vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

Pair = tuple[str, str]

THINK: tuple[Pair, ...] = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
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
    """How it writes calls (node.engine.text.notations); empty where nobody can read them."""
    told: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    thinking: Pair | None = None
    """What it has instead of `THINK`."""
    final: str = ""
    """The header of a message that is text, where an answer is of messages."""
    kinds: tuple[str, ...] = ()
    """Model types of whose folders some have no chat template."""
    switches: tuple[Switch, ...] = SWITCHES
    """Those of its template's variables that say whether it thinks."""
    parsers: tuple[str, ...] = ()
    """mlx-lm's parsers of its notation, where they have other names."""
    remarks: str = ""

    def has(self, source: str, vocabulary: Collection[str], kind: str = "") -> bool:
        if self.kinds and (source or kind not in self.kinds):
            return False
        if self.told:
            return all(word in source for word in self.told)
        return bool(self.tokens) and all(token in vocabulary for token in self.tokens)


_TAG = "<tool_call>"
_CALLS = "<｜tool▁calls▁begin｜>"
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

FAMILIES = (
    Family(
        "gpt-oss",
        "harmony",
        tokens=("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),
        thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        final="<|channel|>final<|message|>",
        switches=(),
        remarks="reasoning_effort is no switch: it always thinks",
    ),
    Family("minimax-m2", "minimax_m2", ("<minimax:tool_call>",)),
    Family("minimax-m3", "minimax_m3", ("]<]minimax[>[", _TAG), thinking=("<mm:think>", "</mm:think>")),
    Family(
        "gemma4", "gemma4", ("<|tool_call>", "<tool_call|>"), thinking=("<|channel>thought", "<channel|>")
    ),
    Family("function-gemma", "function_gemma", ("<start_function_call>",)),
    Family("longcat", "longcat", ("<longcat_tool_call>",)),
    Family("hy3", "hy3", ("<tool_sep", "<arg_key"), thinking=("<think:opensource>", "</think:opensource>")),
    Family(
        "glm",
        "glm47",
        ("<arg_key>",),
        parsers=("laguna",),
        remarks="Laguna, Ling 3 and Spark 2.5 write calls like it",
    ),
    Family("lfm2.5", "pythonic_raw", ("<|tool_call_start|>", "format_arg_value"), parsers=("pythonic",)),
    Family("lfm2", "pythonic", ("<|tool_list_start|>",)),
    Family("lfm2", "pythonic", ("<|tool_call_start|>",)),
    Family("seed-oss", "seed", ("<seed:tool_call>",)),
    Family(
        "qwen3-coder", "qwen3_coder", ("<tool_call>\\n<function=",), remarks="Qwen 3.5, Nemotron 3, Step 3.5"
    ),
    Family("qwen3-coder", "qwen3_coder", ("<tool_call>\n<function=",)),
    Family("kimi-k2", "kimi_k2", ("<|tool_calls_section_begin|>",)),
    Family("minicpm5", "minicpm5", ('<function name="', '<param name="')),
    Family("mistral-small-3.2", "mistral_id", ("[TOOL_CALLS]", "[CALL_ID]"), parsers=("mistral",)),
    Family("mistral", "mistral", ("[TOOL_CALLS]", "[ARGS]"), remarks="Devstral, Ministral 3, Magistral"),
    Family("mistral-nemo", "mistral_list", ("[TOOL_CALLS]",), parsers=("mistral",)),
    Family(
        "muse",
        "muse_spark",
        ("<atem:function_calls>",),
        thinking=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        final="<|message|>",
    ),
    Family("nemotron-nano-2", "nemotron", ("<TOOLCALL>",), thinking=("<think>", "</think>")),
    Family("granite-3", "granite", ("<|tool_call|>",), thinking=("<think>", "</think>")),
    Family(
        "command",
        "command",
        ("<|START_ACTION|>",),
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Family("command-r", "command_r", ("Action:", "```json", "tool_name")),
    Family(
        "solar-open",
        "solar",
        ("<|tool_call:begin|>",),
        thinking=("<|think|>", "<|end|><|begin|>assistant"),
    ),
    Family("apertus", "apertus", ("<|tools_prefix|>",), thinking=("<|inner_prefix|>", "<|inner_suffix|>")),
    Family("apriel", "apriel", ("<tool_calls>[",)),
    Family("minimax-m1", "minimax_m1", ("<tool_calls>",)),
    Family("gigachat-3.1", "gigachat", ("<|function_call|>",)),
    Family("llama4", "llama4", ("<|header_start|>", "parameters")),
    Family("functionary-3.1", "functionary", ("<function=", "<|start_header_id|>")),
    Family("llama3", "llama", ("<|start_header_id|>", '"parameters": ')),
    Family("deepseek-v3", "deepseek_v3", (_CALLS, "```json")),
    Family("deepseek-v3.1", "deepseek", (_CALLS,)),
    Family("deepseek-v4", "dsml_v4", ("DSML", "tool_calls>")),
    Family("deepseek-v4", "dsml_v4", tokens=("｜DSML｜",), kinds=("deepseek_v4", "deepseek_v41")),
    Family("deepseek-v3.2", "dsml", ("DSML",)),
    Family("deepseek-v3.2", "dsml", tokens=("｜DSML｜",)),
    Family("qwen3", "json_tools", (_TAG,), remarks="Hermes, Granite 4, Reka, SmolLM 3 and many others"),
    Family(
        "kimi-k3",
        "kimi_k3",
        tokens=_XTML,
        thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    Family("lfm2.5", "pythonic", tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("gemma4", tokens=("<|channel>", "<channel|>"), thinking=("<|channel>thought", "<channel|>")),
)


def family_of(source: str, vocabulary: Collection[str], parser: str = "", kind: str = "") -> Family:
    """The family of a model with this chat template and these tokens, without a name if it is of none.

    `parser` is the name of mlx-lm's parser, where the folder has one, and `kind` the model's type.
    """
    family = next((row for row in FAMILIES if row.has(source, vocabulary, kind)), Family(""))
    if not parser or parser in (family.notation, *family.parsers):
        return family
    named = [row for row in FAMILIES if row.notation == parser]
    return next(iter(named or [row for row in FAMILIES if parser in row.parsers]), family)


def thinking_of(family: Family, vocabulary: Collection[str]) -> Pair | None:
    """The marks around what a model of this family and vocabulary thinks; None if it does not think."""
    if family.thinking is not None:
        return family.thinking
    return next((pair for pair in THINK if all(mark in vocabulary for mark in pair)), None)


def switches_of(family: Family, source: str) -> tuple[Switch, ...]:
    """The switches for thinking that a model of this family has by its chat template."""
    return tuple(switch for switch in family.switches if re.search(rf"(?<![\w.'\"]){switch.name}\b", source))
