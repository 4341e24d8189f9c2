"""How a model's makers would have it sampled, by its generation_config.json, for requests that do not say it.

The options are those that vLLM takes (`ModelConfig.get_diff_sampling_param`). A `do_sample` of false is a
temperature of 0, as in transformers, which reads no other option of sampling then. An option that the file
does not have is not known: transformers' own default for `top_k`, 50, is not taken.

A file or a number that is no good counts as absent, with a line in the log: the model itself is sound, and
was served before these numbers counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from sealring.mesh.prompt.options import BOUNDS, MODELS_OWN
from sealring.node.models.json_files import read_json
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()


def own_options(path: Path) -> dict[str, float]:
    """The options of MODELS_OWN that the model folder `path` has, within their bounds and in float32."""
    try:
        found = read_json(path / "generation_config.json")
        given = {name: found[name] for name in MODELS_OWN if found.get(name) is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError):
        log.warning("generation_config_ignored", model=path.name)
        return {}
    if found.get("do_sample") is False:
        given["temperature"] = 0
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's "all"
    kept = {name: one for name, value in given.items() if (one := _sound(name, value)) is not None}
    if kept.keys() != given.keys():
        log.warning("generation_config_ignored", model=path.name, options=sorted(given.keys() - kept.keys()))
    return kept


def _sound(name: str, value: Any) -> float | None:
    """The value as requests have it, which tails hold to the same bounds again."""
    try:
        found: float = getattr(inference.Sampling(**{name: value}), name)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if type(value) is not bool and BOUNDS[name].hold(found) else None


def with_own(sampling: inference.Sampling, own: Mapping[str, float]) -> inference.Sampling:
    """The options in force: those that the request does not name are the model's own, where it has them."""
    found = inference.Sampling()
    found.CopyFrom(sampling)
    for name, value in own.items():
        if sampling.unnamed & MODELS_OWN[name]:
            setattr(found, name, value)
    return found
