"""Families, compared with what mlx-lm knows, in both directions."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sealring.node.engine import mlx_lm_import
from sealring.node.engine.text import (
    THINK,
    FileTokenizer,
    LoadedTokenizer,
    family_of,
    format_of,
    load_tokenizer,
    thinking_of,
)
from sealring.node.engine.text.families import FAMILIES, switches_of
from sealring.node.engine.text.notations.notation import NOTATIONS

mlx_lm_import.install()
MODEL = Path(__file__).parents[4] / "examples" / "demo_model" / "model"
PARSERS = {one.name for one in pkgutil.iter_modules(importlib.import_module("mlx_lm.tool_parsers").__path__)}
OURS = {
    *(
        "apertus",
        "apriel",
        "command",
        "command_r",
        "deepseek",
        "deepseek_v3",
        "dsml",
        "dsml_v4",
        "functionary",
    ),
    *("gigachat", "granite", "harmony", "hy3", "llama", "llama4", "minimax_m1", "minimax_m3", "mistral_id"),
    *("mistral_list", "nemotron", "pythonic_raw", "seed", "solar"),
}
"""Notations that mlx-lm has no parser for under this name."""


def test_every_parser_of_mlx_lm_reads_a_notation_of_ours_and_no_other_is_unnamed() -> None:
    assert set(NOTATIONS) - PARSERS == OURS
    for parser in PARSERS:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        form = format_of("", (), parser)
        assert form.call is not None, parser
        begin = form.call[0].removesuffix('"')  # MiniCPM's has the quote in it
        assert (begin, form.call[1]) == (module.tool_call_start, module.tool_call_end), parser


def test_every_notation_is_of_a_family() -> None:
    assert {one.notation for one in FAMILIES} - {""} == set(NOTATIONS)
    assert len({(one.told, one.tokens, one.kinds) for one in FAMILIES}) == len(FAMILIES)


def test_templates_and_tokens_lead_to_the_parsers_of_mlx_lm() -> None:
    from mlx_lm.tokenizer_utils import _infer_tool_parser

    class Model:
        def __init__(self, chat_template: str, tokens: Any = ()) -> None:
            self.chat_template = chat_template
            self.get_vocab = lambda: dict.fromkeys(tokens, 0)

    names = {"mistral_id": "mistral", "mistral_list": "mistral", "pythonic_raw": "pythonic"}
    for row in FAMILIES:
        source = " ".join(row.told)
        found = _infer_tool_parser(Model(source, row.tokens))
        if row.notation in OURS - set(names):
            assert found in (None, "json_tools"), row.name
        elif row.notation and not (row.notation == "json_tools" and found is None):
            assert found == names.get(row.notation, row.notation), row.name
    told = re.findall(r'"(<[^"]+>|\[[A-Z_]+\])" in chat_template', inspect.getsource(_infer_tool_parser))
    assert len(told) > 10
    for word in set(told) - {"<tool_call|>", "<|tool_call>"}:
        ours, theirs = family_of(word, ()).notation, _infer_tool_parser(Model(word))
        assert theirs is None or names.get(ours, ours) == theirs, word


def test_thoughts_are_marked_as_mlx_lm_knows_them() -> None:
    from mlx_lm.tokenizer_utils import _infer_thinking

    class Model:
        def __init__(self, tokens: tuple[str, ...]) -> None:
            self.get_vocab = lambda: dict.fromkeys(tokens, 0)

        def encode(self, text: str, **_: Any) -> list[int]:
            return []

    theirs = re.findall(r'\("(<[^"]+>)", "(<[^"]+>)"\)', inspect.getsource(_infer_thinking))
    assert theirs
    assert set(theirs) <= set(THINK)
    for tokens in (*theirs, *(row.tokens for row in FAMILIES if row.tokens)):
        found = _infer_thinking(Model(tokens))[:2]
        if found[0] is not None:
            assert thinking_of(family_of("", tokens), tokens) == found, tokens


TRANSFORMERS = {"qwen2": "qwen3", "qwen3_5": "qwen3-coder", "gemma4": "gemma4"}
"""Families of the model types whose calls transformers reads, by the first type of each list."""


def test_every_family_that_transformers_reads_is_read_alike() -> None:
    """It reads calls by lists that a folder brings, and by these where a folder brings none."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

    assert {types[0] for types in _RESPONSE_TEMPLATE_FALLBACKS} == set(TRANSFORMERS)
    for types, theirs in _RESPONSE_TEMPLATE_FALLBACKS.items():
        family = next(row for row in FAMILIES if row.name == TRANSFORMERS[types[0]])
        notation, calls = NOTATIONS[family.notation], theirs["fields"]["tool_calls"]
        written = f"{notation.begin}{notation.call % 'look'}"
        assert re.match(calls.get("open_pattern") or re.escape(calls["open"]), written), types
        closed = f"{notation.call_end}{notation.end}".strip()
        assert re.search(calls.get("close_pattern") or re.escape(calls["close"]), closed), types
        thoughts = theirs["fields"]["reasoning_content"]
        pair = family.thinking or THINK[0]
        assert (thoughts["open"].strip(), thoughts["close"]) == pair, types


def test_what_the_page_says_is_read_is_a_family() -> None:
    said = json.loads((Path(__file__).parents[4] / "docs" / "templates.json").read_bytes())
    assert {one["calls"] for one in said.values()} - {""} <= {row.name for row in FAMILIES}


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_both_ways_of_loading_a_folder_find_the_same(row: Any, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    added = content["added_tokens"]
    for name in ("<think>", "</think>", *row.tokens):
        added.append(dict(added[-1], id=1 + max(one["id"] for one in added), content=name, special=False))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("tool_parser_type", None)
    source = " ".join(row.told)
    settings["chat_template"] = f"{{# {source} #}}" if source else None
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if row.kinds:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": row.kinds[0]}))
    quick = load_tokenizer(tmp_path, chats=False)
    assert isinstance(quick, FileTokenizer)
    slow = LoadedTokenizer(tmp_path, 1 << 20, chats=False)
    assert quick.format == slow.format
    assert quick.format.name == row.notation
    assert quick.format.thinking is not None


def test_switches_are_those_that_a_template_names() -> None:
    granite = family_of("<|tool_call|> {% if thinking %}", ())
    assert [one.name for one in switches_of(granite, "{% if thinking %}")] == ["thinking"]
