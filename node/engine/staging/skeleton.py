"""Builds an mlx-lm model from its configuration, with parameters that are never evaluated."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine import mlx_lm_import

from . import second_source
from .conversions import TIED_OUTSIDE, tied_outside
from .denied import DENIED
from .text_part import text_config, wrapped

MAX_LAYERS = 1024
TEXT_ALONE = {"qwen3_5_moe_text": "qwen3_5_moe", "qwen3_5_text": "qwen3_5"}
"""mlx-lm's names of model types that conversions without a tower have: its classes take these too."""

_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")


def build_skeleton(config: dict[str, Any]) -> nn.Module:
    """The model that a configuration describes; its parameters are lazy and random.

    Raises ModelError: MODEL_TYPE_UNKNOWN, MODEL_NEEDS_REMOTE_CODE or BAD_MODEL_CONFIG.
    """
    model_class, arguments_class = model_classes(config)
    check_layers(config)
    try:
        model: nn.Module = model_class(arguments_class.from_dict(config))
    except Exception as error:  # a model's own code may raise anything on a configuration that it dislikes
        raise ModelError(
            f"the configuration of the {config['model_type']} model is incomplete or inconsistent "
            f"({type(error).__name__}: {error})",
            reason="BAD_MODEL_CONFIG",
            hint="compare its config.json with that of a model that works",
        ) from error
    model.eval()
    return model


def check_layers(config: dict[str, Any]) -> None:
    """Raises ModelError for too many layers, before the model is built."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        counts = [part[name] for name in _LAYER_KEYS if isinstance(part.get(name), int)]
        if max(counts, default=0) > MAX_LAYERS:
            raise ModelError(
                f"the configuration of the {config['model_type']} model names {max(counts)} layers",
                reason="BAD_MODEL_CONFIG",
                hint=f"at most {MAX_LAYERS} are served",
            )


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The classes of a configuration's model and of its arguments: mlx-lm's, or mlx-vlm's around its text."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type.replace("-", "_").isidentifier():
        raise ModelError(
            "the model's configuration names no model_type",
            reason="BAD_MODEL_CONFIG",
            hint="config.json needs a model_type, such as llama",
        )
    if config.get("model_file") is not None:
        raise ModelError(
            "the model wants to run code of its own",
            reason="MODEL_NEEDS_REMOTE_CODE",
            hint="use a model of an architecture that mlx-lm ships",
        )
    if second_source.comes_first(config):
        return second_source.classes_of(config)
    said = io.StringIO()
    try:  # mlx-lm has no public way from a configuration to its classes without weights
        with contextlib.redirect_stdout(said):
            model, arguments = mlx_lm_import.import_utils()._get_classes(config)
    except SystemExit as error:  # some of mlx-lm's modules exit when a package is missing
        raise ModelError(
            f"architecture {model_type} needs a package that is not installed",
            reason="MODEL_NEEDS_PACKAGE",
            hint=" ".join(said.getvalue().split())[:200],
        ) from error
    except (ValueError, AttributeError) as error:
        if (text := text_config(config)) is not None:
            return wrapped(*model_classes(text))
        if model_type in TEXT_ALONE:
            return model_classes({**config, "model_type": TEXT_ALONE[model_type]})
        if model_type in second_source.MODEL_TYPES:
            return second_source.classes_of(config)
        if (why := DENIED.get(model_type)) is not None:
            raise ModelError(
                f"models of type {model_type} are not served: {why}",
                reason="MODEL_TYPE_UNKNOWN",
                hint="docs/models.md lists the architectures that are",
                model_type=model_type,
            ) from error
        raise ModelError(
            f"neither mlx-lm nor mlx-vlm has an architecture {model_type} that is served here",
            reason="MODEL_TYPE_UNKNOWN",
            hint="update sealring, or see docs/families.md, which says how a family is added",
            model_type=model_type,
        ) from error
    return model, tied_outside(arguments) if model_type in TIED_OUTSIDE else arguments
