"""The vision tower of a model with its projector: mlx-vlm's code and weights, without the language model.

mlx-vlm's class of a family makes the embeddings of a prompt with images (`get_input_embeddings`): it asks its
language model for those of the tokens, computes the image's rows, and puts them in the place of the image's
tokens. Here a blank stands for the language model, and the prompt is the image's tokens alone. What comes
back are the rows, scaled and rounded as mlx-vlm does it, whatever the family. mlx-lm computes the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from sealring.mesh.errors import Internal, ModelError
from sealring.node.engine.configuration import with_parts
from sealring.node.engine.text.picture import Picture
from sealring.node.engine.weights import read_config, weight_files

from . import mlx_vlm_import

_PIXELS = "pixel_values"
_LANGUAGE = "language_model"
_AUDIO = "audio"
_SPEECH = "enable_audio_output"
"""Whether what makes speech is loaded."""


class Rows(NamedTuple):
    """What an image puts into a prompt."""

    embeddings: mx.array
    """[places, width], in the model's type."""
    residuals: Sequence[mx.array] = ()
    """Arrays of the same shape, added to the output of the first layers, one each (DeepStack,
    arXiv:2406.04334)."""


class Tower:
    """The tower of one model. Its arrays are lazy until somebody reads them."""

    def __init__(self, model: nn.Module, width: int, dtype: mx.Dtype) -> None:
        """`model` is of mlx-vlm's class; a blank takes its language model's place. `width` and `dtype` are
        those of the embeddings. Raises ModelError (BAD_MODEL_CONFIG) if no token stands for images."""
        self._model = _seeing(model)
        self._model.language_model = _Blank(width, dtype)
        self._token = _image_token(self._model.config)
        self.width, self.dtype = width, dtype
        vision = getattr(self._model.config, "vision_config", None)
        self.residuals = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        """Arrays that each image adds to the output of as many layers."""

    @property
    def kept(self) -> list[mx.array]:
        """Its parameters."""
        return [array for name, array in tree_flatten(self._model.parameters()) if _AUDIO not in name]

    @property
    def weight_bytes(self) -> int:
        """The bytes of `kept`."""
        return sum(array.nbytes for array in self.kept)

    def rows(self, picture: Picture) -> Rows:
        """An image's rows, lazy. Raises Internal (TOWER_FAILED) if mlx-vlm's code fails, and what
        `Source.take` raises."""
        count = len(picture.places)
        tokens = mx.full((1, count), self._token, mx.int32)
        if picture.tokens is not None:
            tokens = mx.array(picture.tokens.astype(np.int32))[None]
        arrays = {name: _array(value) for name, value in picture.source.take().items()}
        pixels = arrays.pop(_PIXELS)
        try:
            made = self._model.get_input_embeddings(
                tokens, pixels, mask=mx.ones((1, count), mx.int32), **arrays
            )
            embeddings = made.inputs_embeds[0]
            if embeddings.shape != (count, self.width):
                raise ValueError(f"rows of shape {embeddings.shape}")
        except Exception as error:  # a model's own code may raise anything
            raise Internal(
                f"the vision tower failed on an image ({type(error).__name__})",
                hint="the engine's log says where",
                reason="TOWER_FAILED",
            ) from error
        residuals = made.deepstack_visual_embeds
        if isinstance(residuals, mx.array):  # [1, places, arrays, width]
            residuals = list(residuals[0].swapaxes(0, 1))
        return Rows(embeddings.astype(self.dtype), residuals or ())

    def blank(self, count: int) -> Rows:
        """Zeros in the place of an image's rows."""
        zeros = mx.zeros((count, self.width), self.dtype)
        return Rows(zeros, (zeros,) * self.residuals)


class _Blank:
    """Stands for the language model of mlx-vlm's class: its embeddings are zeros."""

    embed_scale = 1.0
    hidden_size_per_layer_input = 0

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        self._width, self._dtype = width, dtype

    @property
    def model(self) -> _Blank:
        return self

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self._width), self._dtype)

    def get_input_embeddings(self, tokens: mx.array) -> mx.array:
        return self.embed_tokens(tokens)

    def embed_norm(self, embedded: mx.array) -> mx.array:
        return embedded

    def get_per_layer_inputs(self, tokens: mx.array) -> None: ...

    def get_rope_index(self, *_: object, **__: object) -> tuple[None, None]:
        return None, None


def load_tower(path: Path, width: int, dtype: mx.Dtype) -> Tower | None:
    """The tower of the model in a folder, with lazily mapped weights; None if the folder has none.

    Raises ModelError (WEIGHTS_MISMATCH, BAD_MODEL_CONFIG), FailedPrecondition (VISION_NOT_INSTALLED).
    """
    config = read_config(path)
    if not config.get("vision_config"):
        return None
    family = mlx_vlm_import.family(config["model_type"])
    if family is None or not hasattr(family, "VisionModel"):
        return None
    model = _build(family, config)
    weights: dict[str, mx.array] = {}
    for file in weight_files(path):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    for part in (model, family.VisionModel(_seeing(model).config.vision_config)):
        weights = part.sanitize(weights) if hasattr(part, "sanitize") else weights
    tower = Tower(model, width, dtype)
    if not any(name in weights for name, _ in tree_flatten(model.parameters())):
        return None  # as mlx_lm.convert leaves it out
    if "quantization" in config:
        _quantize(model, config["quantization"], weights)
    wanted = {name for name, _ in tree_flatten(model.parameters()) if _AUDIO not in name}
    if missing := sorted(wanted - weights.keys()):
        raise ModelError(
            f"{path.name} lacks {len(missing)} weights of its vision tower, {missing[0]} first",
            hint="download or convert the model again",
            reason="WEIGHTS_MISMATCH",
        )
    model.load_weights([(name, weights[name]) for name in sorted(wanted)], strict=False)
    return tower


def build(config: Mapping[str, Any]) -> nn.Module:
    """mlx-vlm's whole model of a configuration, with lazy random parameters. Raises as `load_tower`."""
    family = mlx_vlm_import.family(config["model_type"])
    if family is None:
        raise ModelError(
            f"mlx-vlm has no architecture {config['model_type']}",
            hint="choose another model",
            reason="MODEL_TYPE_UNKNOWN",
        )
    return _build(family, config)


def _seeing(model: nn.Module) -> Any:
    """The part of a model that has the tower: Qwen's Omni has others beside it."""
    return getattr(model, "thinker", model)


def _build(family: ModuleType, config: Mapping[str, Any]) -> nn.Module:
    """As `mlx_vlm.utils.load_model` does it."""
    given = with_parts(json.loads(json.dumps(config)))
    given[_SPEECH] = False
    for name in ("text_config", "vision_config", "audio_config"):
        given.setdefault(name, {})
    try:
        made = family.ModelConfig.from_dict(given)
        for part in ("text", "vision", "perceiver", "projector", "audio"):
            name = f"{part}_config"
            if hasattr(made, name) and given.get(name) is not None:
                setattr(made, name, getattr(family, f"{part.title()}Config").from_dict(given[name]))
        model: nn.Module = family.Model(made)
    except Exception as error:  # a model's own code may raise anything on a configuration that it dislikes
        raise ModelError(
            f"the vision part of the {config['model_type']} model's configuration is incomplete or "
            f"inconsistent ({type(error).__name__}: {error})"[:300],
            reason="BAD_MODEL_CONFIG",
            hint="compare its config.json with that of a model that works",
        ) from error
    model.eval()
    return model


def _quantize(model: nn.Module, settings: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Quantizes what is quantized in the folder: conversions leave towers, or parts of them, as they are."""

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = settings.get(path)
        return own if isinstance(own, dict) else True

    nn.quantize(
        model,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=chosen,
    )


def _image_token(config: Any) -> int:
    for name in mlx_vlm_import.ROW_TOKENS:
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    raise ModelError(
        "the model's configuration names no token that stands for images",
        hint="compare its config.json with that of a model that works",
        reason="BAD_MODEL_CONFIG",
    )


def _array(value: npt.NDArray[Any]) -> Any:
    return mx.array(value) if isinstance(value, np.ndarray) else value
