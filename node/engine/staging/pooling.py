"""Models that end with a vector in place of logits: embeddings, and scores of a text for a query.

A folder says so by sentence-transformers' `modules.json`, or by vLLM's `classifier_from_token` in its
configuration. An embedding is the state of the prompt's last token behind the model's norm; a score compares
the logits of two tokens there. Both are computed by mlx-lm's own class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from sealring.mesh.errors import ModelError
from sealring.node.models.folders import INNER
from sealring.node.models.json_files import read_json

POOLED = frozenset({"qwen3"})
"""Model types whose stages were compared with the whole model's vectors. Those of some other types look at
tokens on both sides, which no folder says."""

_SERVED = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"], ["Transformer", "LogitScore"])
"""What follows what in a `modules.json` whose vectors are those made here."""

_ENCODERS = re.compile(r"bert|^xlm|mpnet|electra|encoder|_embedding|bidirec")
"""Model types of which every folder makes vectors or scores, also those that do not say so."""

_BOTH_WAYS = {"is_causal": False, "use_bidirectional_attention": True, "bidirectional": True}
"""Settings, and the value by which a decoder's tokens look at those behind them too."""

_CAUSAL = "Qwen3ForCausalLM"
"""The class that Qwen3-Embedding names, whose folders are fetched without those inside them. Models of other
ways of pooling name a class without an output head."""

_MODE = "pooling_mode"
_TYPE = re.compile(r"^sentence_transformers\.([\w.]+\.)?")


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
    model_type = str(config.get("model_type"))[:40]
    if not named and not modules and not _ENCODERS.search(model_type):
        return None
    if model_type not in POOLED:
        raise _unsupported(path, f"vectors of {model_type} models are not served")
    if any(config.get(name) == value for name, value in _BOTH_WAYS.items()):
        raise _unsupported(path, "its tokens look at those behind them too, as an encoder's do")
    if not named and list(modules) not in _SERVED:
        raise _unsupported(path, f"its modules.json lists {', '.join(modules)[:120]}")
    kind = "LogitScore" if named else list(modules)[1]
    file = f"{modules.get(kind)}/config.json"
    settings = _object(path / file) if INNER.fullmatch(file) else {}
    if kind == "LogitScore":
        ids = _ids(path, named) if named else (settings.get("false_token_id"), settings.get("true_token_id"))
        return Pooling(tokens=_two(path, ids, config.get("vocab_size")))
    if not settings and config.get("architectures") != [_CAUSAL]:
        raise _unsupported(path, f"its folder lacks {file}, which says how they are made")
    flags = [name for name, on in settings.items() if name.startswith(f"{_MODE}_") and on]
    modes = [f"{_MODE}_{settings[_MODE]}"] if settings.get(_MODE) else flags
    if settings and modes != [f"{_MODE}_lasttoken"]:
        raise _unsupported(path, f"its vectors are {', '.join(modes)[:120]}, not the last token's alone")
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
    """The folders of the modules that are listed, by the last word of sentence-transformers' types."""
    listed = _read(path / "modules.json")
    return {
        _TYPE.sub("", one["type"]): Path(str(one.get("path") or "")).name.strip(".")
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict) and isinstance(one.get("type"), str)
    }


def _object(file: Path) -> dict[str, Any]:
    found = _read(file)
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> Any:
    try:
        return read_json(file) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def _ids(path: Path, names: Any) -> tuple[Any, ...]:
    model = _object(path / "tokenizer.json").get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    known = words if isinstance(words, dict) else {}
    return (
        tuple(known.get(name) for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    )


def _two(path: Path, ids: tuple[Any, ...], words: Any) -> tuple[int, ...]:
    """MLX reads behind the end of logits for an id beyond the model's `words`."""
    known = range(words) if type(words) is int else ()
    if len(ids) != 2 or not all(type(one) is int and one in known for one in ids):
        raise _unsupported(path, "it does not say which two tokens a score compares")
    return ids


def _unsupported(path: Path, why: str) -> ModelError:
    return ModelError(
        f"the model {path.name} is one of embeddings or scores, and {why}",
        hint="docs/embeddings.md names what is served",
        reason="POOLING_UNSUPPORTED",
    )
