"""The bytes of caches as blocks: what they are, and what is known of how they were made."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from patience import PATIENCE_SECONDS
from stagering import QUANTIZED, compute_thread, prompt_of, quantized_prompt_cache, stages_of, whole

from sealring.node.engine.blocks import layout_of, provenance
from sealring.node.engine.staging.caches import detached, first_tokens

TOKENS, FIRST, END = 12, 3, 9


def bytes_of(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array[..., FIRST:END, :]).view(mx.uint8)).tobytes()


@pytest.mark.parametrize("family", ["llama", "qwen3:8", "deepseek_v3"])
def test_a_block_is_what_its_format_says(family: str) -> None:
    """A change of this needs a higher `node.stored.keys.FORMAT`, or older blocks would be misread."""
    prompt = prompt_of(family, 0, TOKENS)

    def stored() -> bytes:
        (stage,) = stages_of(family, 1)
        layout = layout_of(stage, "")
        assert layout is not None
        cache = stage.make_cache()
        stage([mx.array([prompt], mx.uint32)], cache)
        kept = detached(first_tokens(cache, TOKENS))
        return bytes(layout.content(layout.bytes_of(layout.views(kept), TOKENS), FIRST, END))

    def computed() -> bytes:
        cache = quantized_prompt_cache(family) if family in QUANTIZED else make_prompt_cache(whole(family))
        whole(family)(mx.array([prompt], mx.uint32), cache=cache)
        parts = [part for entry in cache for part in getattr(entry, "caches", (entry,))]
        both = [array for part in parts for array in (part.keys, part.values)]
        each = [one for array in both for one in (array if isinstance(array, tuple | list) else (array,))]
        return b"".join(map(bytes_of, each))

    thread = compute_thread(0)
    stages_of(family, 1)
    assert thread.submit(stored).result(PATIENCE_SECONDS) == thread.submit(computed).result(PATIENCE_SECONDS)


def test_what_computed_a_block_is_known_by_versions_and_weights(
    llama: dict[str, Any], model_folder: Callable[..., Path]
) -> None:
    path = model_folder(llama)
    before = provenance(path)
    assert metadata.version("mlx-lm") in before
    assert mx.__version__ in before
    assert provenance(path) == before
    os.utime(path / "model.safetensors", (0, 0))
    assert provenance(path) != before
