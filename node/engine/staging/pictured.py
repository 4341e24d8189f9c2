"""The model types with vision towers that were compared with mlx-vlm's whole models: one row each.

`check_images` compares them. Of any other type nobody knows whether stages compute images as mlx-vlm does,
and no tower is loaded. To add one, add its configuration to `tests/data/archs-images.json` and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHUNKED, INTERLEAVED = "chunked", "interleaved"
"""How frequencies are divided among the three dimensions of positions: one dimension's behind another's, or
by turns."""


@dataclass(frozen=True)
class Pictured:
    """What is known of one model type."""

    text: str | None = None
    """mlx-lm has only its text part, under this name; "": under the name that its configuration gives."""
    rope: str = ""
    """`CHUNKED` or `INTERLEAVED` where its positions have three dimensions."""
    both_ways: str | None = None
    """The direction of an image's attention where a configuration leaves it out."""
    known_as: str = ""
    """mlx-vlm's name of it where that is not the one of configurations."""
    unfit: str = ""
    """Why its images are not computed, though mlx-lm and mlx-vlm both have it."""


PICTURED: Mapping[str, Pictured] = {
    "aya_vision": Pictured(text=""),
    "deepseek_v41": Pictured(
        unfit="mlx-vlm's tower takes patches in records of its own, and mlx-lm lacks the engram layers of "
        "the published model"
    ),
    "dots_ocr": Pictured(text="qwen2"),
    "gemma3": Pictured(),
    "gemma3n": Pictured(),
    "gemma4": Pictured(),
    "gemma4_unified": Pictured(both_ways="vision"),
    "glm4v": Pictured(text="glm4", rope=CHUNKED),
    "glm4v_moe": Pictured(text="glm4_moe", rope=CHUNKED),
    "glm_ocr": Pictured(text="glm4", rope=CHUNKED),
    "idefics2": Pictured(text=""),
    "idefics3": Pictured(text=""),
    "internvl": Pictured(text=""),
    "internvl_chat": Pictured(text=""),
    "kimi_k25": Pictured(),
    "kimi_k3": Pictured(),
    "kimi_vl": Pictured(),
    "lfm2-vl": Pictured(known_as="lfm2_vl"),
    "llama4": Pictured(),
    "llava": Pictured(),
    "llava_onevision": Pictured(text=""),
    "mage_vl": Pictured(text=""),
    "mimo_v2": Pictured(text="mimo_v2_flash"),
    "minimax_m3_vl": Pictured(),
    "mistral3": Pictured(),
    "muse_glimmer": Pictured(),
    "muse_spark": Pictured(
        unfit="mlx-vlm's and mlx-lm's code run on a Mac's GPU only, where nobody has compared them"
    ),
    "NemotronH_Nano_Omni_Reasoning_V3": Pictured(text="", known_as="nemotron_h_nano_omni"),
    "paddleocr_vl": Pictured(text="llama", rope=CHUNKED),
    "pixtral": Pictured(),
    "prism_hadamard_qwen35": Pictured(rope=INTERLEAVED),
    "qwen2_5_vl": Pictured(rope=CHUNKED),
    "qwen2_vl": Pictured(rope=CHUNKED),
    "qwen3_5": Pictured(rope=INTERLEAVED),
    "qwen3_5_moe": Pictured(rope=INTERLEAVED),
    "qwen3_omni_moe": Pictured(text="qwen3_moe", rope=INTERLEAVED),
    "qwen3_vl": Pictured(rope=INTERLEAVED),
    "qwen3_vl_moe": Pictured(rope=INTERLEAVED),
    "smolvlm": Pictured(text=""),
    "step3p7": Pictured(text=""),
}

SHOWN = frozenset(name for name, one in PICTURED.items() if not one.unfit)
UNFIT = {name: one.unfit for name, one in PICTURED.items() if one.unfit}
WRAPPED = {name: one.text for name, one in PICTURED.items() if one.text is not None}

_OTHER = Pictured()


def pictured(model_type: object) -> Pictured:
    """The row of a model type, an empty one if there is none."""
    return PICTURED.get(str(model_type), _OTHER)
