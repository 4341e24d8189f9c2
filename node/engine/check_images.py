"""Checks that a model cut into stages computes prompts with images as mlx-vlm's whole model does.

Both are made of one folder with random weights. mlx-vlm's model is called as mlx-vlm calls it: embeddings of
the whole prompt, then chunks of them, then tokens one by one. The stages get tokens, and rows of images at
the head. All logits of rows alone are compared, and then those of the rows together with these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from sealring.node.engine import caches
from sealring.node.engine.check import ranges_of
from sealring.node.engine.check_runs import largest_difference
from sealring.node.engine.configuration import with_parts
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.grid import attends_both_ways, needs_grids
from sealring.node.engine.staging.mrope import Positions
from sealring.node.engine.staging.splicing import embedded
from sealring.node.engine.text.picture import Picture, grids_of
from sealring.node.engine.transfer import through_record, transfer
from sealring.node.engine.vision import mlx_vlm_import
from sealring.node.engine.vision.prefilling import Images
from sealring.node.engine.vision.sizes import tower_bytes
from sealring.node.engine.vision.tower import Tower, build, load_tower
from sealring.node.engine.weights import load_lazily, load_stage

_SPREAD = 0.05
_DECODE_STEPS = 4
_BREAK = 1
_CHUNK = 7
"""Tokens of a chunk that no image makes longer: an odd number, and fewer than the images of some prompts."""


@dataclass(frozen=True)
class ImageReport:
    """The largest differences of logits; None where one is no number."""

    model_type: str
    stages: list[list[int]]
    alone: float | None
    """Between mlx-vlm's whole model and the stages, each row with images by itself."""
    cut: float | None
    """Between the stages with a prompt's chunks, and with the prompt as one, where mlx-vlm computes it so."""
    text: float | None
    """Likewise, each row without images: its positions have one dimension here, and three there."""
    together: float | None
    """Between rows that decode together and the same rows alone."""
    blind: float | None
    """Between the stages with images and the same stages without. 0 would say that images are not seen."""
    largest: float
    """The largest logit."""
    tower_bytes: int
    counted_bytes: int
    """What a plan counts for the tower."""


@dataclass(frozen=True)
class Prompt:
    """Tokens, uint32 [tokens], and the images among them."""

    tokens: npt.NDArray[np.uint32]
    pictures: tuple[Picture, ...]
    at_once: bool = False
    """Whether a prompt with images is one chunk."""

    def chunks(self) -> list[tuple[int, int]]:
        """Chunks of _CHUNK tokens, or to the edge of an image in which they would end; the last token by
        itself."""
        if self.at_once and self.pictures:
            return [(0, len(self.tokens))]
        ends = [0]
        while (begin := ends[-1]) < len(self.tokens) - 1:
            end = min(begin + _CHUNK, len(self.tokens) - 1)
            inside = [one for one in self.pictures if one.start < end < one.end]
            ends += [one.start if one.start > begin else one.end for one in inside] or [end]
        return list(zip(ends, [*ends[1:], len(self.tokens)], strict=True))


def prompts(
    vocabulary: int,
    token: int,
    kinds: Sequence[Mapping[str, Any]],
    seed: int,
    *,
    at_once: bool = False,
    also: Sequence[int] = (),
) -> list[Prompt]:
    """A prompt with one image, one with several, one without, and one that begins with an image.

    `kinds` are images: `shapes` of random arrays, `values` of arrays, the number of `rows`, and
    how many of these stand in a `row` of the image, behind each of which is another token. Tokens may stand
    `before` and `behind` all. `token` stands for a row, and so do those of `also`.
    """
    random = np.random.default_rng(seed)
    made = []
    for layout in (["one", 5], [9, "one", 3, "two", 6], [6], ["two", 2, "one", 4], [3, "one", 2]):
        tokens: list[int] = []
        pictures = []
        for part in layout:
            if isinstance(part, int):
                tokens += random.integers(3, min(vocabulary, token, *also) - 8, part).tolist()
                continue
            kind = kinds[0 if part == "one" else -1]
            arrays = {
                name: random.normal(size=shape).astype(np.float32) for name, shape in kind["shapes"].items()
            } | {name: np.array(value) for name, value in kind.get("values", {}).items()}
            start, long = len(tokens), kind.get("row", kind["rows"])
            tokens += kind.get("before", [])
            for _ in range(kind["rows"] // long):
                tokens += [token] * long + [_BREAK] * ("row" in kind)
            tokens += kind.get("behind", [])
            places = np.flatnonzero(np.isin(tokens, [token, *also]))
            places = places[places >= start]
            kept = np.array(tokens, np.uint32)[places]
            digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).digest()
            pictures.append(Picture.of(start, len(tokens), places, digest, arrays, kept))
        made.append(Prompt(np.array(tokens, np.uint32), tuple(pictures), at_once))
    return made


def random_whole(
    config: Mapping[str, Any], seed: int, dtype: mx.Dtype = mx.float32, language: str = ""
) -> nn.Module:
    """mlx-vlm's whole model with random weights, which depend on the seed and their names. `language` is the
    model type whose language model it gets, if the family's own is not that of the configuration."""
    mx.random.seed(seed)
    model = build(config)
    if language:
        other: Any = mlx_vlm_import.family(language)
        arguments = other.ModelConfig.from_dict(with_parts(config)["text_config"])
        model.language_model = other.language.LanguageModel(arguments)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")
            value = (value + _SPREAD * mx.random.normal(value.shape, key=mx.random.key(key))).astype(dtype)
        weights.append((name, value))
    model.update(tree_unflatten(weights))
    return model


def save(model: nn.Module, config: Mapping[str, Any], folder: Path, names: Mapping[str, str]) -> None:
    """Writes a model's folder, with the weights' names as publishers have them: `names` are beginnings of
    mlx-vlm's names and what stands in their place."""
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        begin = next((one for one in names if name.startswith(one)), "")
        weights[names.get(begin, "") + name.removeprefix(begin)] = value
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))


class WholeVisionModel:
    """mlx-vlm's whole model, as `mlx_vlm.generate` calls it, for one row at a time."""

    def __init__(self, model: nn.Module, scale: float = 1.0, axis: int = 0) -> None:
        """`scale`: the factor of a text's embeddings that mlx-vlm leaves out. `axis`: on which a prompt's
        images stand behind one another in `pixel_values`."""
        self._model: Any = model
        self._scale, self._axis = scale, axis

    def __call__(self, prompt: Prompt, more: int) -> tuple[list[mx.array], list[int]]:
        """The logits of each chunk and of each of `more` greedy tokens, and these."""
        tokens = mx.array(prompt.tokens.astype(np.int32))[None]
        language = self._model.language_model
        for name in {"_position_ids", "_rope_deltas"} & vars(language).keys():
            setattr(language, name, None)  # of the prompt before
        arrays = {name: mx.array(value) for name, value in _joined(prompt.pictures, self._axis).items()}
        pixels = arrays.pop("pixel_values", None)
        seen = np.zeros(tokens.shape, np.bool_)
        seen[:, [place for picture in prompt.pictures for place in picture.places]] = True
        made = self._model.get_input_embeddings(
            tokens, pixels, mask=mx.ones(tokens.shape, mx.int32), **arrays
        )
        embeddings = made.inputs_embeds
        if self._scale != 1:
            embeddings = mx.where(mx.array(seen)[..., None], embeddings, embeddings * self._scale)
        others = {
            name: value
            for name, value in made.to_dict().items()
            if name != "inputs_embeds" and value is not None
        }
        cache = language.make_cache() if hasattr(language, "make_cache") else _plain(language)
        if prompt.at_once and prompt.pictures:
            others["mm_token_type_ids"] = mx.array(seen.astype(np.int32))
        logits = []
        for start, end in prompt.chunks():
            out = language(
                inputs=tokens[:, start:end],
                inputs_embeds=embeddings[:, start:end],
                cache=cache,
                n_to_process=end - start,
                **others,
            )
            logits.append(out.logits[0].astype(mx.float32))
            mx.eval(logits[-1])
        chosen = [_greedy(logits[-1])]
        for _ in range(more):
            out = language(inputs=mx.array([[chosen[-1]]]), cache=cache)
            logits.append(out.logits[0].astype(mx.float32))
            chosen.append(_greedy(logits[-1]))
        return logits, chosen


class StagedVisionModel:
    """The stages, with the tower at the head."""

    def __init__(self, stages: Sequence[Stage], tower: Tower, *, placed: bool) -> None:
        """`placed`: the stages need to know where images are."""
        self._stages = stages
        self._placed = placed
        self._images = Images(tower)
        self._transfer = transfer()
        stages[0].take_images(tower.residuals)

    def prefill(self, prompt: Prompt, *, blind: bool = False) -> tuple[list[mx.array], list[Any]]:
        """The logits of each chunk, and the row's caches, one of each stage."""
        cache = [stage.make_cache() for stage in self._stages]
        logits = []
        positions = self._positions(prompt)
        for start, end in prompt.chunks():
            pictures = () if blind else prompt.pictures
            more = self._images.inputs(0, pictures, start, end, _fail)
            logits.append(self.step([mx.array(prompt.tokens[None, start:end]), *more], cache, positions)[0])
        return logits, cache

    def step(self, state: list[mx.array], cache: list[Any], positions: Positions | None = None) -> mx.array:
        """Logits, float32 [rows, tokens, vocabulary]."""
        rows, length = state[0].shape[:2]
        for stage, own in zip(self._stages, cache, strict=True):
            outputs = stage(state, own, positions)
            if stage.spec.is_tail:
                break
            tensors = stage.spec.hands_on
            buffer = self._transfer.receive_buffer(tensors, rows, length)
            buffer.fill(through_record(self._transfer, outputs, tensors, rows, length))
            state = buffer.arrays
        mx.eval(outputs)
        self._transfer.settle()
        return outputs[0].astype(mx.float32)

    def alone(self, prompt: Prompt, tokens: Sequence[int]) -> list[mx.array]:
        """The logits of each chunk and each token."""
        logits, cache = self.prefill(prompt)
        positions = self._positions(prompt)
        return logits + [self.step([mx.array([[token]], mx.uint32)], cache, positions)[0] for token in tokens]

    def together(self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]]) -> list[list[mx.array]]:
        """As `alone`, of rows that are prefilled one by one and decode as a batch."""
        logits, rows = zip(*(self.prefill(prompt) for prompt in prompts), strict=True)
        batch = [caches.merge(own) for own in zip(*rows, strict=True)]
        positions = Positions.together([self._positions(prompt) for prompt in prompts])
        found = [list(own) for own in logits]
        for step in zip(*tokens, strict=True):
            made = self.step([mx.array([[token] for token in step], mx.uint32)], batch, positions)
            for own, one in zip(found, made, strict=True):
                own.append(one)
        return found

    def _positions(self, prompt: Prompt) -> Positions | None:
        return Positions.of(grids_of(prompt.pictures)) if self._placed and prompt.pictures else None


def check_images(
    config: Mapping[str, Any],
    kinds: Sequence[Mapping[str, Any]],
    token: int,
    *,
    stages: int = 2,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    names: Mapping[str, str] | None = None,
    also: Sequence[int] = (),
    scale: float = 1.0,
    axis: int = 0,
    at_once: bool = False,
    language: str = "",
) -> ImageReport:
    """Compares mlx-vlm's whole model with stages; arguments as `prompts`, `random_whole`, `save` and
    `WholeVisionModel` have them. `at_once`: mlx-vlm knows positions of images in a prompt's first chunk only.

    Raises ModelError.
    """
    parts = with_parts(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_whole(config, seed, dtype, language)
        save(model, config, folder, names or {})
        lazy, _ = load_lazily(folder)
        ranges = ranges_of(len(lazy.layers), stages=stages)
        tower = load_tower(folder, *embedded(lazy))
        assert tower is not None, "the folder has no tower"
        counted = tower_bytes(folder)
        loaded = [load_stage(folder, lo, hi) for lo, hi in ranges]
        staged = StagedVisionModel(loaded, tower, placed=needs_grids(config))
        whole = WholeVisionModel(model, scale, axis)
        vocabulary = parts.get("text_config", parts).get("vocab_size") or parts["vocab_size"]
        at_once = at_once or attends_both_ways(config)
        asked = prompts(vocabulary, token, kinds, seed, at_once=at_once, also=also)
        expected = [whole(prompt, _DECODE_STEPS) for prompt in asked]
        chosen = [tokens[:-1] for _, tokens in expected]
        alone = [staged.alone(prompt, tokens) for prompt, tokens in zip(asked, chosen, strict=True)]
        together = staged.together(asked, chosen)
        cut = [dataclasses.replace(prompt, at_once=False) for prompt in asked if prompt.at_once]
        chunked = [mx.concatenate(staged.prefill(prompt)[0]) for prompt in cut]
        blind = [staged.prefill(prompt, blind=True)[0] for prompt in asked]
    flat = [logits for row in alone for logits in row]
    return ImageReport(
        model_type=config["model_type"],
        stages=[list(one) for one in ranges],
        alone=_difference(asked, expected, alone, seen=True),
        cut=largest_difference(chunked, [mx.concatenate(row[:-_DECODE_STEPS]) for row in alone[: len(cut)]]),
        text=_difference(asked, expected, alone, seen=False),
        together=largest_difference([logits for row in together for logits in row], flat),
        blind=largest_difference(
            [row[-1] for row in blind], [row[len(dark) - 1] for row, dark in zip(alone, blind, strict=True)]
        ),
        largest=max(float(mx.max(mx.abs(logits)).item()) for logits in flat),  # type: ignore[arg-type]
        tower_bytes=tower.weight_bytes,
        counted_bytes=counted,
    )


def check_family(family: Mapping[str, Any], *, stages: int) -> ImageReport:
    """`check_images` of an entry of tests/data/archs-images.json."""
    more = {name: family[name] for name in family.keys() - {"config", "images", "token", "rounding"}}
    return check_images(family["config"], family["images"], family["token"], stages=stages, **more)


def _difference(
    prompts: Sequence[Prompt],
    expected: Sequence[tuple[list[mx.array], list[int]]],
    found: Sequence[list[mx.array]],
    *,
    seen: bool,
) -> float | None:
    """The largest difference of logits, of the prompts with images or of those without."""
    which = [at for at, prompt in enumerate(prompts) if bool(prompt.pictures) == seen]
    return largest_difference(
        [logits for at in which for logits in expected[at][0]],
        [logits for at in which for logits in found[at]],
    )


def _joined(pictures: Sequence[Picture], axis: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a prompt's images, as a processor makes them of all at once: behind one another, smaller
    ones filled up with zeros."""
    found: dict[str, npt.NDArray[Any]] = {}
    all_of = [one.source.take() for one in pictures]
    for name in all_of[0] if all_of else ():
        along = axis if name == "pixel_values" else 0
        each = [taken[name] for taken in all_of]
        shape = np.max([array.shape for array in each], axis=0).astype(int)
        room = [shape - array.shape for array in each]
        padded = [
            np.pad(array, [(0, 0 if at == along else more) for at, more in enumerate(own)])
            for array, own in zip(each, room, strict=True)
        ]
        found[name] = np.concatenate(padded, axis=along)
    return found


def _greedy(logits: mx.array) -> int:
    token = mx.argmax(logits[-1]).item()
    assert isinstance(token, int)
    return token


def _plain(language: Any) -> list[Any]:
    from mlx_vlm.models.cache import KVCache

    return [KVCache() for _ in language.layers]


def _fail(error: Exception) -> None:
    raise error
