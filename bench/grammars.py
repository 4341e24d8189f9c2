"""Cost of a schema to a step of 8 rows with a large vocabulary, and to rows without a schema beside them.

CPU time of one process: the least of several steps, in turns. A step has two layers, which is the smallest
last stage: masks are a smaller part of any other. Two lanes take turns, as in a ring. One never has a
grammar; the other has eight, or none. The vocabulary is made up of syllables.
"""

from __future__ import annotations

import argparse
import itertools
import time
from types import SimpleNamespace
from typing import Any

from bench.frame import Result, Table
from bench.models import Shape, configuration
from bench.verdict import Check, ratios

QUICK = ("--rounds", "1", "--steps", "3")
QUICK_SECONDS = 90.0

ROWS = 8
WAYS = ("free", "held")
_ITEMS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "string", "pattern": "^[a-z]{3,12}( [a-z]{3,12})*$"},
    {"enum": ["one", "two", "three"]},
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "at": {"type": "number"}},
        "required": ["name"],
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 20},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    {},
]
"""Schemas of the items, one for each row: its answer is an array of such items that never ends."""


def run(options: argparse.Namespace) -> Result:
    """Milliseconds of CPU a step, round by round, of either lane, by what the other one or itself has."""
    import mlx.core as mx

    from sealring.node.engine.params import RowParameters
    from sealring.node.engine.sampling import Sampler
    from sealring.node.engine.staging import random_model
    from sealring.node.engine.text.piecewise import as_json

    mx.set_default_device(mx.cpu)
    shape = Shape(layers=2, hidden=256, heads=4, kv_heads=4, vocabulary=options.vocabulary)
    model: Any = random_model(configuration(shape), seed=1)
    mx.eval(model.parameters())
    grammars = _grammars(options.vocabulary)
    schemas = [{"type": "array", "items": items, "minItems": 1000} for items in _ITEMS]
    compiled = [f"start: {as_json(schema)}" for schema in schemas]
    for grammar in compiled:
        grammars.compile(grammar)

    def lane(held: bool) -> Any:
        rows = [
            RowParameters(matcher=grammars.start(compiled[row], ()) if held else None) for row in range(ROWS)
        ]
        sampler, state = Sampler(rows, [0] * ROWS), SimpleNamespace(tokens=mx.zeros((ROWS, 1), mx.int32))

        def step() -> float:
            begun = time.process_time()
            logits = model(state.tokens)[:, -1, :]
            mx.async_eval(logits)
            state.tokens = sampler(logits)[:, None]
            mx.eval(state.tokens)
            return time.process_time() - begun

        return step

    names = ("own", "other")
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in names}
    for _ in range(options.rounds):
        lanes = {way: {"own": lane(way == "held"), "other": lane(False)} for way in WAYS}
        spent: dict[tuple[str, str], list[float]] = {(name, way): [] for name in names for way in WAYS}
        for number in range(2 + options.steps):
            for way in WAYS if number % 2 else WAYS[::-1]:
                for name in names:
                    spent[name, way].append(lanes[way][name]())
        for (name, way), steps in spent.items():
            found[name][way].append(round(min(steps[2:]) * 1e3, 3))
    return {"vocabulary": options.vocabulary, "rows": ROWS, "steps": options.steps, "ms": found}


def _grammars(vocabulary: int) -> Any:
    """Grammars over a tokenizer with `vocabulary` tokens: every byte, and words of up to four syllables, with
    and without a space before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from sealring.node.engine.grammar import Grammars

    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnprstvwz", "aeiou")]
    words = (
        space + "".join(word)
        for count in range(1, 5)
        for word in itertools.product(syllables, repeat=count)
        for space in ("", "Ġ")
    )
    marks = ['"}', '",', '":', '{"', '["', "},", "],", "Ġ{", 'Ġ"', "00", "tr", "ue", "fa", "lse"]
    spelt = [*pre_tokenizers.ByteLevel.alphabet(), *marks]
    names = dict.fromkeys([*spelt, *itertools.islice(words, vocabulary)])
    known = {name: number for number, name in enumerate(list(names)[: vocabulary - 1])}
    backend = Tokenizer(models.BPE(vocab=known, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    text, size = backend.to_str(), backend.get_vocab_size()
    made: Any = SimpleNamespace(vocabulary=lambda: text, size=size, end_tokens={size - 1})
    return Grammars(lambda: made, vocabulary)


def checks(result: Result) -> list[Check]:
    own, other = result["ms"]["own"], result["ms"]["other"]
    return [
        Check("CPU of a step, 8 rows with a grammar / none", ratios(own["held"], own["free"]), 1.15),
        Check("CPU of another lane's step beside them / none", ratios(other["held"], other["free"]), 1.01),
    ]


def tables(result: Result) -> list[Table]:
    rows = [[name, *(" ".join(map(str, ways[way])) for way in WAYS)] for name, ways in result["ms"].items()]
    return [Table("ms of CPU a step, round by round", ["lane", "without grammars", "8 grammars"], rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each lane and round")
