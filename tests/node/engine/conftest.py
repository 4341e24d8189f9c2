from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import stagering
from mlx.utils import tree_flatten

from sealring.node.engine import device
from sealring.node.engine.staging import random_model

ARCHS = Path(__file__).parents[2] / "data" / "archs.json"


def _interrupts_others() -> None:
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# Tests and MLX's thread for them, which begins here, do not interrupt each other: a sixth of what they cost.
device.compute_in_batches()
mx.eval(mx.zeros((3,), stream=mx.cpu) + 1)
_interrupts_others()


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    device.compute_in_batches()
    yield
    _interrupts_others()


ON_METAL = bool(os.environ.get("METAL"))
"""Whether these tests compute on a Mac's GPU (`make test METAL=1 ARGS=tests/node/engine`), as engines do
there; else on the CPU, where results are the same on every machine."""


@pytest.fixture(autouse=True)
def _on_one_device() -> None:
    """And with the same random numbers in each run: MLX takes the time for a seed."""
    mx.set_default_device(mx.gpu if ON_METAL else mx.cpu)
    mx.random.seed(7)


@pytest.fixture(autouse=True)
def _without_compilation() -> Iterator[None]:
    """For a CPU MLX has g++ compile each kernel, for a second, where this machine has not run it before.

    Engines that are processes of their own do compile, and so does everything on Metal.
    """
    if ON_METAL:
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="session", autouse=True)
def _free_the_stages_of_rings() -> Iterator[None]:
    yield
    stagering.free()


@pytest.fixture(scope="session")
def archs() -> dict[str, dict[str, Any]]:
    """One small configuration per architecture."""
    found: dict[str, dict[str, Any]] = json.loads(ARCHS.read_bytes())
    return found


@pytest.fixture
def llama() -> dict[str, Any]:
    """A tiny llama with tied embeddings, 5 layers."""
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 100,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder with a model of random weights, as mlx-lm would read it."""

    def write(
        config: dict[str, Any], *, seed: int = 0, dtype: mx.Dtype = mx.float32, name: str = "model"
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        weights = dict(tree_flatten(random_model(config, seed=seed, dtype=dtype).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder

    return write
