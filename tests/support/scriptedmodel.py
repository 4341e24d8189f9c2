"""A model folder that follows a script: what each program's agent calls and says is known before.

Template, tokens, prefill of the whole prompt, sealed records, parsing of calls, deltas and events are those
of any model, and only the wit is not. The template looks at the tools, at what was said since the last cue of
a user and at what tools returned, and ends the prompt with a special token, one for each answer. The weights
are a chain: each token is followed by one other, so that the special token is followed by its answer and the
answer by the end of the sequence. The layers compute attention like any llama, and then add nothing.

A model that sees is made of the bundled one (`examples/seeing_model`). It is twice as wide: the chain is in
dimensions in which its layers compute nothing. Where a scene says LOOK, the template shows the images alone,
with a question of the model's training, and the answer is what the model sees.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

from sealring.node.engine.text import ChatTemplate
from sealring.node.models.folders import VISION, bundled_model

BASE = bundled_model()
"""The model whose tokenizer is extended."""

QUESTION = "What is in this picture?"
"""One that the bundled model that sees was trained to answer."""

LOOK = ""
"""The answer of a model that sees to the images that it was shown."""

LOST = "I have lost the thread of this script."
"""The answer where no result holds what the script expects."""

ASIDE = "A short title"
"""The answer to a request without any cue, or without tools: titles and summaries."""

_WIDTH = 128
_LAYERS = 2
_PIECE = 6
"""Characters of a token of an answer, at least: each token belongs to one answer only."""

_SCALE = 12.0
"""By which the right token's logit exceeds the others', whatever the temperature."""

_LOUD = 1e3
"""Length of a chain's embedding in a model that sees, beside which nothing that its layers add is noticed."""

_SURE = 4.0
"""By which the logits of a model that sees are multiplied, for it to say the likeliest at any temperature."""


Answer = tuple[tuple[str, bool], ...]


class Whole(str):
    """A text that is one token: an answer that a grammar holds, as with a call that is `whole`."""


@dataclass(frozen=True)
class Call:
    """A call of one tool. As one token if `whole`: where a grammar holds it, llguidance spells what must come
    in the tokens that the tokenizer itself would take, which are in no chain."""

    name: str
    arguments: Mapping[str, Any]
    whole: bool = False

    def written(self, notation: str) -> str:
        """As the family's template writes it."""
        told = {"name": self.name, "arguments": self.arguments}
        return ChatTemplate(_writer(notation), {}).render([], (), {"calls": [told]}).removesuffix("\n")


@dataclass(frozen=True)
class Step:
    """One answer: a text, calls, or both. `after` is in what users and tools said, or the answer is LOST."""

    says: str | Call | Sequence[str | Call]
    after: str = ""

    def parts(self, notation: str) -> Answer:
        """The texts of the answer, and which of them are one token. Neighbours that are not are one text."""
        said = [self.says] if isinstance(self.says, (str, Call)) else self.says
        ends = ["\n"] * (len(said) - 1) + [""]
        parts = [
            (f"{one}{end}", isinstance(one, Whole))
            if isinstance(one, str)
            else (f"{one.written(notation)}{end}", one.whole)
            for one, end in zip(said, ends, strict=True)
        ]
        kinds = itertools.groupby(parts, lambda part: part[1])
        joined = [
            [("".join(text for text, _ in group), False)] if not whole else list(group)
            for whole, group in kinds
        ]
        return tuple(itertools.chain(*joined))


@dataclass(frozen=True)
class Scene:
    """What is said from a user's message that holds the `cue` on, if the program offers the `tool`.

    Without a `tool` it is for requests that offer none.
    """

    cue: str
    tool: str
    steps: Sequence[Step]


def write_scripted(
    folder: Path,
    scenes: Sequence[Scene],
    *,
    context: int = 131_072,
    ends: int = 0,
    sees: bool = False,
    notation: str = "json_tools",
) -> None:
    """Writes the model. `ends`: of each text the template renders only that many last characters. `sees`: it
    has a tower, and scenes may LOOK. It writes calls in the `notation`, of tests/data/notations, whose marks
    are no tokens of their own here."""
    base = bundled_model(VISION) if sees else BASE
    answers: list[Answer] = [((LOST, False),), ((ASIDE, False),)]
    played = []
    for scene in scenes:
        steps = []
        for step in scene.steps:
            if step.says == LOOK:
                steps.append([step.after, -1])
                continue
            if (parts := step.parts(notation)) not in answers:
                answers.append(parts)
            steps.append([step.after, answers.index(parts)])
        played.append([scene.cue, scene.tool, steps])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((base / "tokenizer.json").read_bytes())
    following = _extend(tokenizer, answers)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = json.loads((BASE / "tokenizer_config.json").read_bytes())
    settings |= {"model_max_length": context, "chat_template": _template(played, ends, notation)}
    del settings["tool_parser_type"]  # its family is known by what its template writes
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((base / "config.json").read_bytes()) | {"vocab_size": len(following)}
    text = config["text_config"] if sees else config
    text |= {"vocab_size": len(following), "max_position_embeddings": context}
    if sees:
        text |= {"hidden_size": 2 * _WIDTH, "rms_norm_eps": text["rms_norm_eps"] / 2}
        for file in ("preprocessor_config.json", "processor_config.json"):
            (folder / file).write_bytes((base / file).read_bytes())
    else:
        text |= {"hidden_size": _WIDTH, "intermediate_size": 16, "num_hidden_layers": _LAYERS, "head_dim": 16}
        text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
    rounded = config.pop("quantization", None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = _weights(following)
    if sees:
        weights = _seeing(following, _unpacked(load_file(base / "model.safetensors"), rounded))
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})


def _extend(tokenizer: dict[str, Any], answers: Sequence[Answer]) -> list[int]:
    """Adds the answers' tokens; returns by token the one that follows."""
    vocabulary = tokenizer["model"]["vocab"]
    end = vocabulary["<|end|>"]
    used, spelling = set(vocabulary), _spelling()
    # A token that is not in the vocabulary would be given another number
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    following = [end] * len(vocabulary)
    for number, answer in enumerate(answers):
        chain = [f"<|say_{number}|>"]
        for text, whole in answer:
            spelt = "".join(spelling[byte] for byte in text.encode())
            chain += [spelt] if whole else _pieces(spelt, used)
            used.update(chain)
        first = len(following)
        following += [*range(first + 1, first + len(chain)), end]
        tokenizer["added_tokens"].append(
            {"id": first, "content": chain[0], "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        )
        vocabulary.update({piece: first + place for place, piece in enumerate(chain)})
    return following


def _pieces(text: str, used: set[str]) -> list[str]:
    """The text cut into pieces that nobody has used before."""
    pieces, start = list[str](), 0
    while start < len(text):
        end = start + _PIECE
        while text[start:end] in used and end < len(text):
            end += 1
        while text[start:end] in used:  # the rest of the text: joins what is before it
            start -= len(pieces.pop())
        pieces.append(text[start:end])
        used.add(pieces[-1])
        start = end
    return pieces


def _spelling() -> list[str]:
    """GPT-2's printable characters for all bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _weights(following: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)

    def some(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape, dtype=np.float32)

    heads = some(len(following), _WIDTH)
    heads /= np.linalg.norm(heads, axis=1, keepdims=True)
    ones = np.ones(_WIDTH, np.float32)
    weights = {
        "model.embed_tokens.weight": heads[list(following)],
        "lm_head.weight": heads * _SCALE,
        "model.norm.weight": ones,
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.self_attn.{one}_proj.weight": some(16, _WIDTH) for one in "qkv"}
        weights |= {f"{name}.mlp.{one}_proj.weight": some(16, _WIDTH) for one in ("gate", "up")}
        for silent in ("self_attn.o", "mlp.down"):
            weights[f"{name}.{silent}_proj.weight"] = np.zeros((_WIDTH, 16), np.float32)
        for norm in ("input", "post_attention"):
            weights[f"{name}.{norm}_layernorm.weight"] = ones
    return weights


def _unpacked(
    weights: dict[str, np.ndarray[Any, Any]], how: Mapping[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of the bundled model as numbers: a chain cannot be added to packed ones."""
    found = {}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        if kind == "weight" and f"{stem}.scales" in weights:
            parts = [mx.array(weights[f"{stem}.{part}"]) for part in ("scales", "biases")]
            value = np.array(mx.dequantize(mx.array(value), *parts, **how))
        found[name] = value
    return found


def _seeing(
    following: Sequence[int], trained: dict[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """The trained weights, twice as wide. Trained layers use the first half. The chain is in the second,
    where they find nothing."""
    heads = np.random.default_rng(3).standard_normal((len(following), _WIDTH), dtype=np.float32)
    heads /= np.linalg.norm(heads, axis=1, keepdims=True)

    def wider(name: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name.startswith("vision_tower."):
            return value
        if name.endswith("norm.weight"):  # the mean is taken over twice as many
            return np.concatenate([value / np.sqrt(np.float32(2)), np.ones(_WIDTH, np.float32)])
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "linear_1.weight", ".bias"))
        more = (_WIDTH if writes or "linear_2" in name else 0, 0 if writes else _WIDTH)
        return np.pad(value, [(0, one) for one in more[: value.ndim]])

    weights = {name: wider(name, value) for name, value in trained.items()}
    table, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    known = len(trained[table])
    chain = range(known, len(following))
    for name in (table, head):
        weights[name] = np.pad(weights[name], [(0, len(chain)), (0, 0)])
    weights[head] *= np.float32(_SURE)
    weights[table][known:, _WIDTH:] = heads[following[known:]] * np.float32(_LOUD)
    said = sorted({*chain, *following[known:]})
    weights[head][said, _WIDTH:] = heads[said] * np.float32(_SCALE)
    return weights


def _writer(notation: str) -> str:
    """The template that writes `calls`."""
    return (Path(__file__).parents[1] / "data" / "notations" / f"{notation}.jinja").read_text()


def _template(scenes: Sequence[Any], ends: int, notation: str) -> str:
    filled = _TEMPLATE.replace("SCENES", json.dumps(scenes)).replace("ENDS", str(ends))
    return filled.replace("QUESTION", QUESTION).replace("WRITER", _writer(notation))


# As strict as many models': one system message, the first, never two messages of a user in a row, and images
# of a user only.
_TEMPLATE = """\
{%- macro cut(text) %}{{ text if not ENDS or text | length <= ENDS else text[-ENDS:] }}{% endmacro -%}
{%- macro turn(role, text, images='') -%}
{{ '<|' + role + '|>' + images + text | replace('<|', '<') | trim + '<|end|>' }}
{%- endmacro -%}
{%- macro written(calls) %}WRITER{% endmacro -%}
{%- set scenes = SCENES -%}
{%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list -%}
{%- set now = namespace(scene=none, done=0, heard='', role='', shown='', said='', images='') -%}
{%- for tool in tools or [] -%}
{%- set now.shown = now.shown + tool | tojson + '\\n' -%}
{%- endfor -%}
{%- if now.shown and messages[0].role != 'system' -%}
{%- set now.said = turn('system', cut(now.shown)) -%}
{%- endif -%}
{%- for message in messages -%}
{%- set parts = [] if message.content is string else message.content or [] -%}
{%- set images = '<|image|>' * (parts | selectattr('type', 'equalto', 'image') | list | length) -%}
{%- set texts = parts | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\\n') -%}
{%- set text = message.content if message.content is string else texts -%}
{%- set now.images = now.images + images -%}
{%- if images and message.role != 'user' %}{{ raise_exception('only a user shows images') }}{% endif -%}
{%- if message.role == 'system' -%}
{%- if not loop.first %}{{ raise_exception('a system message is the first one') }}{% endif -%}
{%- set now.said = now.said + turn('system', cut(text + '\\n\\n' + now.shown)) -%}
{%- elif message.role == 'user' -%}
{%- if now.role == 'user' %}{{ raise_exception('a user speaks in turns') }}{% endif -%}
{%- for scene in scenes -%}
{%- if scene[0] in text and (scene[1] in names or not scene[1] and not names) -%}
{%- set now.scene = scene -%}
{%- set now.done = 0 -%}
{%- endif -%}
{%- endfor -%}
{%- set now.heard = now.heard + text -%}
{%- set now.said = now.said + turn('user', cut(text), images) -%}
{%- elif message.role == 'tool' -%}
{%- set now.heard = now.heard + text -%}
{%- set now.said = now.said + turn('user', '<tool_response>\\n' + cut(text) + '\\n</tool_response>') -%}
{%- elif message.role == 'assistant' -%}
{%- set now.done = now.done + 1 -%}
{%- set called = (message.tool_calls or []) | map(attribute='function') | list -%}
{%- set calls = written(called) if called else '' -%}
{%- set now.said = now.said + turn('assistant', cut(text) + calls) -%}
{%- else -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{%- set now.role = message.role -%}
{%- endfor -%}
{%- if now.scene is none -%}
{%- set say = 1 -%}
{%- else -%}
{%- set step = now.scene[2][[now.done, now.scene[2] | length - 1] | min] -%}
{%- set say = step[1] if step[0] in now.heard else 0 -%}
{%- endif -%}
{{- bos_token -}}
{{- now.said if say >= 0 else turn('user', 'QUESTION', now.images) -}}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if say >= 0 %}<|say_{{ say }}|>{% endif %}{% endif -%}
"""
