"""mlx-vlm's own loops of drafts and their verification, on a whole model of mlx-lm: an oracle."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from sealring.node.engine import load_lazily, read_config
from sealring.node.engine.drafts import classes_of, kind_of
from sealring.node.engine.staging.interception import intercept_call


class _Whole:
    """A model of mlx-lm with what mlx-vlm's loops ask of its own."""

    def __init__(self, folder: Path) -> None:
        self.whole, config = load_lazily(folder)
        self.model, self.lm_head = self.whole.model, getattr(self.whole, "lm_head", None)
        self.config = SimpleNamespace(**config)
        self._seen: dict[int, mx.array] = {}
        for index, layer in enumerate(self.model.layers):
            intercept_call(layer, self._noting(index))

    def _noting(self, index: int) -> Any:
        def note(original: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self._seen[index] = output[0] if isinstance(output, tuple) else output
            return output

        return note

    def __call__(self, inputs: mx.array, cache: Any, capture_layer_ids: Sequence[int], **_: Any) -> Any:
        logits = self.whole(inputs, cache=cache)
        states = [self._seen[layer] for layer in sorted(capture_layer_ids)]
        return SimpleNamespace(logits=logits, hidden_states=states, gdn_states=None)

    def rollback_speculative_cache(self, caches: Any, _: Any, accepted: int, size: int) -> None:
        for part in caches:
            part.trim(size - 1 - accepted)


def rounds(
    folder: Path, drafter: Path, prompt: Sequence[int], tokens: int, block: int
) -> list[tuple[int, list[int]]]:
    """Pairs of a token of the greedy answer and the tokens that were guessed behind it, by round. Each round
    has `block` tokens with the first."""
    whole, config = _Whole(folder), read_config(drafter)
    kind = kind_of(config)
    assert kind is not None
    made, settings = classes_of(kind)
    model = made(settings.from_dict(config))
    weights: Any = mx.load(str(drafter / "model.safetensors"))
    model.load_weights(list(model.sanitize(dict(weights)).items()))
    model.prefer_requested_block_size = True
    caches = make_prompt_cache(whole.whole)
    layers = model.config.capture_layer_ids if kind == "EAGLE-3" else model.config.target_layer_ids
    given = mx.array([prompt], mx.uint32)
    out = whole(given, caches, layers)
    hidden, first = mx.concatenate(out.hidden_states, axis=-1), mx.argmax(out.logits[0, -1]).item()
    found: list[tuple[int, list[int]]] = []
    draft = model.draft_block

    def noting(bonus: int, *args: Any, **kwargs: Any) -> mx.array:
        guessed: mx.array = draft(bonus, *args, **kwargs)
        found.append((int(bonus), guessed.reshape(-1).tolist()))
        return guessed

    model.draft_block = model.draft_block_greedy = noting
    options: dict[str, Any] = {
        "first_bonus": first,
        "max_tokens": tokens,
        "sampler": lambda logits: mx.argmax(logits, axis=-1),
        "draft_block_size": block,
        "token_dtype": mx.uint32,
        "greedy_sampling": True,
    }
    if kind == "EAGLE-3":
        loop, options["prompt_tokens"] = "eagle3", given
    else:
        loop = "dflash"
    run = getattr(importlib.import_module(f"mlx_vlm.speculative.{loop}"), f"_{loop}_rounds")
    list(run(whole, model, caches, hidden, **options))
    return found
