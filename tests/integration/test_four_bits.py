"""Sealed rings of three over models of 4 bits, whose text part is mlx-vlm's, answer as the whole model."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hasty
import pytest
import pytest_asyncio
from kernels import share_kernels
from ringtest import CLUSTER, HASTY, MODEL, Arrangements, chat
from sixty import CHATS, TEXTS, Whole, ask_all, check_all, said
from small_models import DATA, write_model

from sealring.cli.local.cluster import LocalCluster
from sealring.node.engine import load_lazily
from sealring.node.engine.staging.second_source import MODEL_TYPES
from sealring.node.engine.text import load_tokenizer
from sealring.v1 import inference_pb2 as inference

pytestmark = [*CLUSTER, pytest.mark.sweep, pytest.mark.timeout(1800)]
CONFIGS: dict[str, dict[str, Any]] = {
    key: config
    for key, config in json.loads((DATA / "archs-more.json").read_bytes()).items()
    if config["model_type"] in MODEL_TYPES and key != "glm_moe_dsa"  # of which mlx-lm has all layers
}
GROUP, TOKENS = 32, 6
WIDTHS = {"head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "index_head_dim", "hc_lowrank"}
WIDTHS |= {"kv_lora_rank", "q_lora_rank", "o_lora_rank", "intermediate_size", "moe_intermediate_size"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def arrangements(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arrangements]:
    """Three nodes, which serve one model after the other."""
    folder = tmp_path_factory.mktemp("bits") / "state"
    async with LocalCluster(folder, MODEL, nodes=3, settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        share_kernels(folder)
        await cluster.start()
        async with Arrangements(cluster) as arrangements:
            yield arrangements


def prompts() -> list[inference.Prompt]:
    """Sixty. The longest have more tokens than any window, choice of keys or pool of the models."""
    long = [text * (1 + 12 * (place % 3 == 0)) for place, text in enumerate(TEXTS)]
    return [inference.Prompt(text=text) for text in long] + [said(chat("", text)) for text in CHATS]


def quantized(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with matrices that are wide enough to be quantized, in 4 bits."""
    return _wide(config) | {"quantization": {"group_size": GROUP, "bits": 4}, "eos_token_id": 2}


def _wide(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _wide(value)
        if isinstance(value, dict)
        else max(value, GROUP)
        if name in WIDTHS and isinstance(value, int)
        else value
        for name, value in config.items()
    }


@pytest.mark.parametrize("family", CONFIGS)
async def test_sixty_answers_are_those_of_the_whole_model(
    arrangements: Arrangements, tmp_path: Path, family: str
) -> None:
    """In batches of eight, every other prompt sealed. Near ties are named."""
    folder = write_model(tmp_path / "model", quantized(CONFIGS[family]), seed=5)
    tokenizer = load_tokenizer(folder)

    def encode(prompt: inference.Prompt) -> list[int]:
        if prompt.WhichOneof("input") == "text":
            return tokenizer.encode_text(prompt.text)
        messages = [{"role": one.role, "content": one.content} for one in prompt.chat.messages]
        return tokenizer.encode_chat(messages)

    whole = Whole(load_lazily(folder)[0], encode, tokenizer.end_tokens)
    ring = await arrangements.have(model=str(folder), stages=3, context=512, prefill_chunk=16)
    asked = prompts()
    answers = await ask_all(ring, asked, TOKENS)
    assert len({answer.tokens for answer in answers}) > len(asked) // 4
    equal = check_all(whole, asked, answers, TOKENS)
    assert len(asked) == 60
    assert len(equal) > len(asked) // 2
    tokenizer.close()
