"""Notations of tool calls, each written down once, for readers and for grammars.

A special token stands in a text between marks (`spelt`), so that no text can forge it. Readers take time in
proportion to what they read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around the name of a special token; no characters of a text."""

MARKS = re.compile(f"[{OPEN}{CLOSE}]")
NAME = r"[^\s<>{}()\[\]\"'=" + OPEN + CLOSE + r"]{1,256}"
KEY = r"[^\n<>\"" + OPEN + CLOSE + r"]{1,256}"
LONGEST = 400
"""Characters of the longest marker with a name in it."""


@dataclass(frozen=True)
class Notation:
    """How calls are written between `begin` and `end`: what stands before a call's arguments, with %s for the
    tool's name and # for a number or an id, and what stands behind them. A line break may be missing."""

    begin: str
    end: str
    call: str = ""
    call_end: str = ""
    several: bool = False
    """Whether one pair of `begin` and `end` holds several calls."""
    also: tuple[str, ...] = ()
    """Other beginnings of a call that are read."""
    bare: bool = True
    """Whether a call without `begin` is read, too."""
    starts: tuple[str, ...] = ()
    """Texts that begin a call where an answer begins with them."""
    number: str = "[0-9]{1,3}"
    """What # matches in a call that is held to a grammar."""


@dataclass(frozen=True)
class Objects(Notation):
    """Objects of JSON that hold name and arguments."""

    keyed: bool = False
    """The name is the key, and the arguments are its value."""
    alone: bool = False
    """Whether an answer is a call that is nothing but one object (`reading.Alone`)."""
    bare: bool = False


@dataclass(frozen=True)
class Headed(Notation):
    """A name, then JSON; or a list of objects of JSON, which `held` begins and ends."""

    held: tuple[str, str] | None = None


@dataclass(frozen=True)
class Pieces(Notation):
    """Arguments one by one, texts as they are and all else as JSON; %s is for an argument's name."""

    text: str = ""
    text_end: str = ""
    value: str = ""
    value_end: str = ""
    kinds: bool = False
    """Whether `text` and `value` say which of both a value is."""
    escaped: bool = False
    """Whether names have & and quotes as in XML."""
    cdata: bool = False
    """Whether a text may stand in XML's CDATA."""

    @property
    def breaks(self) -> bool:
        return "\n" in self.value + self.value_end + self.call


@dataclass(frozen=True)
class Flat(Notation):
    """`name{key:value}` with quotes and objects of its own."""

    quote: str = ""


@dataclass(frozen=True)
class Nested(Notation):
    """XML whose elements are arguments and what is in them; `mark` stands before each tag."""

    mark: str = ""


@dataclass(frozen=True)
class Python(Notation):
    """A list of calls of functions in Python. Without `escapes` a text stands between quotes as it is."""

    escapes: bool = True


_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_OBJECT = '{"name": "%s", "arguments": '
_FUNCTION = ("\n<function=%s>\n", "</function>\n")
_DSML = "｜DSML｜"
_BOX = "<|tool_call_start|>", "<|tool_call_end|>"
_HY = ":opensource>"


def _dsml(outer: str) -> Pieces:
    parameter, end = f'<{_DSML}parameter name="%s" string="', f"</{_DSML}parameter>\n"
    return Pieces(
        f"<{_DSML}{outer}>",
        f"</{_DSML}{outer}>",
        f'\n<{_DSML}invoke name="%s">\n',
        f"</{_DSML}invoke>\n",
        text=f'{parameter}true">',
        text_end=end,
        value=f'{parameter}false">',
        value_end=end,
        kinds=True,
        several=True,
    )


def _pieces(begin: str, end: str, call: tuple[str, str], key: str, ends: str, **more: Any) -> Pieces:
    """A text is written like any other value: the schema alone says what it is."""
    return Pieces(begin, end, *call, text=key, text_end=ends, value=key, value_end=ends, **more)


def _arguments(begin: str, end: str, prefix: str = "") -> Pieces:
    key = f"<{prefix}arg_key>%s</{prefix}arg_key>\n<{prefix}arg_value>"
    return _pieces(begin, end, ("%s\n", ""), key, f"</{prefix}arg_value>\n")


def _parameters(begin: str, end: str, pad: str) -> Pieces:
    return _pieces(begin, end, _FUNCTION, f"<parameter=%s>{pad}", f"{pad}</parameter>\n", several=True)


def _invokes(begin: str, end: str, prefix: str = "") -> Pieces:
    call = f'\n<{prefix}invoke name="%s">\n', f"</{prefix}invoke>\n"
    key = f'<{prefix}parameter name="%s">'
    return _pieces(begin, end, call, key, f"</{prefix}parameter>\n", several=True)


NOTATIONS: dict[str, Notation] = {
    "json_tools": Objects(_TAG, _TAG_END, f"\n{_OBJECT}", "}\n", alone=True),
    "llama": Objects(
        "<|python_tag|>",
        "",
        '{"name": "%s", "parameters": ',
        "}",
        starts=("{",),
    ),
    "granite": Objects("<|tool_call|>", "", f"[{_OBJECT}", "}]", starts=("[",)),
    "nemotron": Objects("<TOOLCALL>", "</TOOLCALL>", f"[{_OBJECT}", "}]"),
    "apriel": Objects("<tool_calls>", "</tool_calls>", f"[{_OBJECT}", "}]"),
    "minimax_m1": Objects("<tool_calls>", "</tool_calls>", f"\n{_OBJECT}", "}\n"),
    "gigachat": Objects("<|function_call|>", "", _OBJECT, "}"),
    "command": Objects(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '[\n    {"tool_call_id": "#", "tool_name": "%s", "parameters": ',
        "}\n]",
    ),
    "command_r": Objects(
        "Action: ```json\n", "\n```", '[\n    {\n        "tool_name": "%s",\n        "parameters": ', "}]"
    ),
    "apertus": Objects("<|tools_prefix|>", "<|tools_suffix|>", '[{"%s": ', "}]", keyed=True),
    "mistral": Headed("[TOOL_CALLS]", "", "%s[ARGS]", also=("%s[CALL_ID]#[ARGS]", "%s"), bare=False),
    "mistral_id": Headed(
        "[TOOL_CALLS]", "", "%s[CALL_ID]#[ARGS]", also=("%s[ARGS]", "%s"), bare=False, number="[a-zA-Z0-9]{9}"
    ),
    "mistral_list": Headed(
        "[TOOL_CALLS]",
        "",
        "%s[ARGS]",
        also=("%s[CALL_ID]#[ARGS]", "%s"),
        bare=False,
        held=(f"[{_OBJECT}", "}]"),
    ),
    "deepseek_v3": Headed(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        several=True,
    ),
    "deepseek": Headed(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        several=True,
    ),
    "kimi_k2": Headed(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.%s:#<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        several=True,
        also=(
            "<|tool_call_begin|>%s:#<|tool_call_argument_begin|>",
            "<|tool_call_begin|>%s<|tool_call_argument_begin|>",
        ),
    ),
    "solar": Headed(
        "<|tool_calls|>",
        "<|calls|>",
        "<|tool_call:begin|>#<|tool_call:name|>%s<|tool_call:args|>",
        "<|tool_call:end|>",
        several=True,
    ),
    "functionary": Headed("<function=", "</function>", "%s>", bare=False),
    "harmony": Headed(
        "<|channel|>commentary to=functions.", "", "%s <|constrain|>json<|message|>", bare=False
    ),
    "qwen3_coder": _parameters(_TAG, _TAG_END, "\n"),
    "seed": _parameters("<seed:tool_call>", "</seed:tool_call>", ""),
    "minimax_m2": _invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "muse_spark": _invokes("<atem:function_calls>", "</atem:function_calls>", "atem:"),
    "dsml": _dsml("function_calls"),
    "dsml_v4": _dsml("tool_calls"),
    "glm47": _arguments(_TAG, _TAG_END),
    "longcat": _arguments("<longcat_tool_call>", "</longcat_tool_call>", "longcat_"),
    "hy3": _pieces(
        f"<tool_calls{_HY}",
        f"</tool_calls{_HY}",
        (f"\n<tool_call{_HY}%s<tool_sep{_HY}\n", f"</tool_call{_HY}\n"),
        f"<arg_key{_HY}%s</arg_key{_HY}\n<arg_value{_HY}",
        f"</arg_value{_HY}\n",
        several=True,
    ),
    "minicpm5": _pieces(
        '<function name="',
        "</function>",
        ('%s">', ""),
        '<param name="%s">',
        "</param>",
        cdata=True,
        bare=False,
    ),
    "kimi_k3": Pieces(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        '<|open|>call tool="%s" index="#"<|sep|>',
        "<|close|>call<|sep|>",
        several=True,
        text='<|open|>argument key="%s" type="string"<|sep|>',
        text_end="<|close|>argument<|sep|>",
        value='<|open|>argument key="%s" type="#"<|sep|>',
        value_end="<|close|>argument<|sep|>",
        kinds=True,
        escaped=True,
    ),
    "gemma4": Flat("<|tool_call>", "<tool_call|>", "call:%s{", "}", quote='<|"|>'),
    "function_gemma": Flat("<start_function_call>", "<end_function_call>", "call:%s{", "}", quote="<escape>"),
    "minimax_m3": Nested(
        "]<]minimax[>[<tool_call>",
        "]<]minimax[>[</tool_call>",
        '\n]<]minimax[>[<invoke name="%s">',
        "]<]minimax[>[</invoke>\n",
        several=True,
        mark="]<]minimax[>[",
    ),
    "pythonic": Python(*_BOX, "[%s(", ")]", bare=False),
    "pythonic_raw": Python(*_BOX, "[%s(", ")]", bare=False, escapes=False),
    "llama4": Python("<|python_start|>", "<|python_end|>", "[%s(", ")]", bare=False, starts=("[", "{")),
}
"""By name."""


@lru_cache(maxsize=256)
def spelt(text: str, special: frozenset[str]) -> str:
    """A text of markers as it comes in an answer whose special tokens these are."""
    if not special:
        return text
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    return re.sub(names, lambda found: f"{OPEN}{found[0]}{CLOSE}", text)


def unmarked(text: str) -> str:
    """A text with special tokens by their names."""
    return MARKS.sub("", text)
