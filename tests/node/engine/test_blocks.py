"""The bytes of caches as blocks and snapshots: what they are, and what is known of how they were made."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from patience import PATIENCE_SECONDS
from small_models import DATA, tiny
from stagering import QUANTIZED, compute_thread, prompt_of, quantized_prompt_cache, stages_of, whole

from sealring.node.engine.blocks import BlockLayout, layout_of, provenance
from sealring.node.engine.caches import Cache, detached, first_tokens
from sealring.node.engine.caches.undo import cut_to, mark
from sealring.node.engine.profile import shape_of
from sealring.node.engine.staging import build_skeleton, random_stage
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.models.folders import NOTE, FolderState
from sealring.node.models.kept import Note, every_part
from sealring.node.models.manifest import Manifest

TOKENS, FIRST, END = 12, 3, 9
CHUNKS, MARKED = [24, 9, 5], 33
"""Chunks of a prompt, longer than most windows here; it is kept at its end and marked behind the second."""
BLOCKS = [(0, 16), (16, MARKED)]

ARCHS = [json.loads((DATA / name).read_bytes()) for name in ("archs.json", "archs-more.json")]
NOT_HERE = {"phi3small", "phi3small:dense", "bitnet", "muse_spark", "olmo", "olmo:tied"}
"""They need Metal, another package, or crash MLX on a CPU (test_architectures)."""
ALL: dict[str, dict[str, Any]] = {
    key: config for archs in ARCHS for key, config in archs.items() if key not in NOT_HERE
}
ALWAYS = {"gpt_oss", "qwen3_next", "llama4", "gemma3n"}


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
        return bytes(layout.content(layout.bytes_of(layout.views(kept, 0, TOKENS), TOKENS), FIRST, END))

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


NOT_STORED = {
    *("deepseek_v4", "deepseek_v41", "glm5_next"),  # layers that compress what they have read
    "longcat_flash_sparse:ngram",  # a state that grows with the first tokens
}

NOT_KNOWN = {"longcat_flash_ngram"}
"""Stored, and not known to be: only a stage's code keeps a state of one length (`staging/together.py`)."""


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.sweep] * (key not in ALWAYS | NOT_STORED)) for key in ALL]
)
def test_a_profile_says_whether_caches_are_stored(key: str) -> None:
    config = tiny(ALL[key], key)
    model = build_skeleton(config)
    shape = shape_of(model, config, dissect(model, config["model_type"]))
    assert shape["travels"] == (key not in NOT_STORED | NOT_KNOWN)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.sweep] * (key not in ALWAYS)) for key in ALL]
)
def test_a_row_goes_on_from_blocks_and_a_snapshot_as_if_it_had_never_ended(key: str) -> None:
    """In all kinds of caches but those of NOT_STORED."""
    config = tiny(ALL[key], key)
    words = range(3, min(50, config.get("vocab_size") or 50))
    tokens = random.Random(key).choices(words, k=sum(CHUNKS))

    def goes_on() -> bool | None:
        """None for caches that are not stored."""
        stage = random_stage(config, 0, len(build_skeleton(config).layers), seed=3)
        layout = layout_of(stage, "")
        if layout is None:
            return None
        cache, marks, at = stage.make_cache(), {}, 0
        for size in CHUNKS:
            stage([mx.array([tokens[at : at + size]], mx.uint32)], cache)
            at += size
            marks[at] = mark(detached(first_tokens(cache, at)))
        kept = detached(first_tokens(cache, at))
        cut = cut_to(kept, MARKED, marks[MARKED])
        read = through_the_disk(layout, kept, cut, stage.make_cache())
        rest = [mx.array([part], mx.uint32) for part in ([3, 1, 4, 1, 5], [9])]
        equal = [mx.array_equal(stage([part], cut)[0], stage([part], read)[0]).item() for part in rest]
        return all(equal)

    def through_the_disk(layout: BlockLayout, kept: Cache, cut: Cache, read: Cache) -> Cache:
        held, snapshot = (
            layout.bytes_of(layout.views(kept, 0, sum(CHUNKS)), sum(CHUNKS)),
            layout.snapshot(cut, MARKED),
        )
        assert snapshot is not None
        content = layout.snapshot_content(snapshot, MARKED)
        blocks = [layout.arrays(layout.content(held, *ends), ends[1] - ends[0]) for ends in BLOCKS]
        layout.fill(read, blocks, layout.snapshot_arrays(content, MARKED), MARKED)
        return read

    found = compute_thread(0).submit(goes_on).result(PATIENCE_SECONDS)
    assert found is (None if key in NOT_STORED else True)


def test_what_computed_a_block_is_known_by_versions_and_weights(
    llama: dict[str, Any], model_folder: Callable[..., Path]
) -> None:
    path = model_folder(llama)
    before = provenance(path)
    for package in ("mlx", "mlx-lm", "mlx-vlm"):
        assert repr(metadata.version(package)) in before
    assert provenance(path) == before
    os.utime(path / "model.safetensors", (0, 0))
    assert provenance(path) != before


def test_weights_that_were_fetched_are_known_by_their_hashes(
    llama: dict[str, Any], model_folder: Callable[..., Path]
) -> None:
    """A member whose layers grow in number fetches parts, which changes the times of files."""
    path = model_folder(llama)
    made = Manifest.of(path)

    def note(manifest: Manifest, **known: Any) -> None:
        Note(manifest, every_part(manifest), FolderState.read(path), **known).write(path / NOTE)

    note(made)
    before = provenance(path)
    os.utime(path / "model.safetensors", (0, 0))
    assert provenance(path) != before, "somebody else has written to it"
    note(made)
    assert provenance(path) == before
    note(made, commit="a" * 40)
    assert provenance(path) != before, "of the hub's files nothing is known yet"
    note(made, commit="a" * 40, hub_files="b" * 64)
    known = provenance(path)
    note(made, commit="a" * 40, hub_files="b" * 64, checked=True)
    assert provenance(path) == known
