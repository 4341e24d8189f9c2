"""Models that end with a vector in place of logits: embeddings, and scores of a text for a query.

A folder says so by sentence-transformers' `modules.json`, or by vLLM's `classifier_from_token` in its
configuration. An embedding is the state of the prompt's last token behind the model's norm; a score compares
the logits of two tokens there. Both are computed by mlx-lm's own class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from sealring.mesh.errors import ModelError

POOLED = frozenset({"qwen3"})
"""Model types whose stages were compared with the whole model's vectors. Those of some other types look at
tokens on both sides, which no folder says."""

_KINDS = ("Pooling", "LogitScore")
_ANSWERS = ("no", "yes")
_LAST = {"pooling_mode": "lasttoken", "pooling_mode_lasttoken": True}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model's vectors are made. `tokens` are the two of a score, no and yes; an embedding has none and
    may be made unit-length (`normalized`)."""

    normalized: bool = False
    tokens: tuple[int, ...] = ()


def pooling_of(path: Path, config: Mapping[str, Any]) -> Pooling | None:
    """How the model in a folder makes vectors; None for one that makes tokens.

    Raises ModelError (POOLING_UNSUPPORTED).
    """
    modules = _modules(path)
    named = config.get("classifier_from_token")
    kind = "LogitScore" if named else next((one for one in _KINDS if one in modules), "")
    if not kind:
        return None
    if config.get("model_type") not in POOLED:
        raise _unsupported(path, f"vectors of {config.get('model_type')} models are not served")
    settings = _read(path / modules.get(kind, "") / "config.json") if modules.get(kind) else {}
    if kind == "LogitScore":
        ids = settings.get("false_token_id"), settings.get("true_token_id")
        return Pooling(tokens=_two(path, ids if None not in ids else _ids(path, named or _ANSWERS)))
    if settings and not any(settings.get(name) == value for name, value in _LAST.items()):
        raise _unsupported(path, "its vectors are not the last token's")
    return Pooling(normalized="Normalize" in modules)


def pooled(classes: tuple[Any, Any], how: Pooling) -> tuple[Any, Any]:
    """mlx-lm's class of such a model, returning vectors [rows, tokens, width]: states behind the norm, or the
    logits of the two tokens. Weights of a model that was saved without its head have shorter names."""
    whole: Any = classes[0]

    class Pooled(whole):  # type: ignore[misc]
        pooling = how

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            if not how.tokens:
                self.pop("lm_head", None)

        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            if how.tokens:
                logits: mx.array = super().__call__(*args, **kwargs)
                return logits[..., mx.array(how.tokens)]
            states: mx.array = self.model(*args, **kwargs)
            return states

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if not any(name.startswith("model.") for name in weights):
                weights = {f"model.{name}": it for name, it in weights.items()}
            if not how.tokens:
                weights = {name: it for name, it in weights.items() if not name.startswith("lm_head.")}
            made: dict[str, mx.array] = super().sanitize(weights)
            return made

    return Pooled, classes[1]


def _modules(path: Path) -> dict[str, str]:
    """The folders of the modules that are listed, by the last word of their types."""
    found = _read(path / "modules.json")
    listed = found if isinstance(found, list) else []
    return {
        str(one.get("type")).rpartition(".")[2]: Path(str(one.get("path") or "")).name
        for one in listed
        if isinstance(one, dict)
    }


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _ids(path: Path, names: Any) -> tuple[Any, ...]:
    vocabulary = _read(path / "tokenizer.json").get("model", {}).get("vocab", {})
    return tuple(vocabulary.get(name) for name in names)


def _two(path: Path, ids: tuple[Any, ...]) -> tuple[int, ...]:
    if len(ids) != 2 or not all(isinstance(one, int) and one >= 0 for one in ids):
        raise _unsupported(path, "the tokens that a score compares are not in its vocabulary")
    return ids


def _unsupported(path: Path, why: str) -> ModelError:
    return ModelError(
        f"the model {path.name} is one of embeddings or scores, and {why}",
        hint="docs/embeddings.md names what is served",
        reason="POOLING_UNSUPPORTED",
    )
