"""Kinds of drafters are those that mlx-vlm tells apart."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import ModelError
from sealring.node.engine.drafts import DrafterFacts, classes_of, kind_of
from sealring.node.engine.drafts.drafter_models import FAMILIES, MODULES

spec = importlib.util.find_spec("mlx_vlm")
assert spec is not None
assert spec.origin is not None
ROOT = Path(spec.origin).parent
"""What it imports is not all installed, so its source is read."""


def rule() -> Callable[[dict[str, Any]], str | None]:
    """`mlx_vlm.utils.get_model_type`."""
    names = ("MODEL_REMAPPING", "get_model_type")
    body = [
        one
        for one in ast.parse((ROOT / "utils.py").read_text()).body
        if getattr(one, "name", "") in names
        or (isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in names)
    ]
    found: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), "utils", "exec", flags=0x1000000), found)
    own: Callable[[dict[str, Any]], str | None] = found["get_model_type"]
    return own


OWN = rule()
DRAFTERS = {one.parent.name for one in (ROOT / "speculative" / "drafters").glob("*/__init__.py")}
NAMES = st.sampled_from(sorted({"qwen3", "gemma4", "laguna", "llama", "mistral", "muse_glimmer", *DRAFTERS}))
RANKS = st.integers(0, 8)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "model_type": NAMES,
        "speculators_model_type": NAMES,
        "architectures": st.lists(st.sampled_from(["DFlash2DraftModel", "Gemma4DSparkModel", "Other"])),
        "markov_rank": RANKS,
        "dflash_config": st.fixed_dictionaries(
            {}, optional={"projector_type": st.sampled_from(["dspark", "mlp"]), "markov_rank": RANKS}
        ),
    },
)


@given(CONFIGS)
def test_a_kind_is_that_of_the_module_that_mlx_vlm_loads(config: dict[str, Any]) -> None:
    """A module that no kind here has is named, so that its drafters are refused by it."""
    module, kind = OWN(config), kind_of(config)
    if module in MODULES:
        assert kind == MODULES[module]
    elif module in DRAFTERS and not module.endswith("_mtp"):
        assert kind == module
    else:
        assert kind in (None, module)
    if kind is not None and kind not in FAMILIES:
        with pytest.raises(ModelError, match=kind) as refused:
            DrafterFacts.of("folder", config)
        assert refused.value.reason == "DRAFT_KIND_UNKNOWN"


@pytest.mark.parametrize("module", MODULES)
def test_a_kind_has_a_module_of_mlx_vlm_and_models(module: str) -> None:
    assert module in DRAFTERS
    assert FAMILIES[MODULES[module]]
    assert all(classes_of(MODULES[module]))
