"""Real rings of three over models that are no plain chain of layers give the tokens of mlx-lm."""

import asyncio

import mlx.core as mx
import pytest
from ringtest import CLUSTER, chat, started
from sharing import ask, dialogue
from small_models import tiny, write_model
from stagering import UNUSUAL, config_of

from sealring.cli.local.cluster import LocalCluster
from sealring.node.engine import import_whole, load_lazily
from sealring.node.engine.text import load_tokenizer

pytestmark = [*CLUSTER, pytest.mark.sweep, pytest.mark.timeout(900)]
OTHERS = ["gpt_bigcode", "hunyuan", "llama4", "longcat_flash_ngram", "minimax_m3_vl:all-sparse"]
OTHERS += ["nanochat", "recurrent_gemma", "rwkv7", "talkie"]
OF_MLX_VLM = [
    "deepseek_v4",
    "flint",
    "glm5_next",
    "glm_moe_dsa:shared",
    "hy_v4",
    "inkling_mm_model",
    "qwen4_exp",
]
ROWS = [
    ("Hello!", 24),
    ("What is the capital of Kenya? " * 6, 12),
    ("Why?", 30),
    ("Name the planets. " * 3, 16),
]


class Whole:
    """A whole model's greedy tokens by mlx-lm, as the text that a head makes of them."""

    def __init__(self, folder, of_mlx_lm=True):
        self._model, _ = import_whole().load(str(folder)) if of_mlx_lm else load_lazily(folder)
        self.tokenizer = load_tokenizer(folder)

    def text(self, messages, max_tokens):
        from mlx_lm.generate import generate_step

        prompt = mx.array(self.tokenizer.encode_chat(messages))
        detokenizer, text = self.tokenizer.detokenizer(), ""
        for token, _ in generate_step(prompt, self._model, max_tokens=max_tokens):
            if token in self.tokenizer.end_tokens:
                break
            text += detokenizer.add(int(token))
        return joined(text + detokenizer.flush())


def joined(text):
    """Without line ends: one stands here where there was a special token; the head leaves nothing of it."""
    return text.replace("\n", "")


@pytest.mark.parametrize("family", [*UNUSUAL, *OTHERS, *OF_MLX_VLM])
async def test_real_rings_of_three(tmp_path, family):
    """Also an answer that is alone and repeats itself, so that tokens are guessed."""
    await _answers_as_whole(tmp_path, family, stages=3, speculate=True)


async def _answers_as_whole(tmp_path, family, **spec):
    config = tiny(config_of(family), family) | {"eos_token_id": 2}
    model = write_model(tmp_path / "model", config, seed=5)
    whole = Whole(model, of_mlx_lm=family not in OF_MLX_VLM)
    async with (
        LocalCluster(
            tmp_path / "state", model, nodes=spec["stages"], name=family.partition(":")[0]
        ) as cluster,
        started(cluster, **spec, prefill_chunk=16, context=512) as ring,
    ):
        replies = await asyncio.gather(*(ring.ask(chat(text), most) for text, most in ROWS))
        assert all(reply.text for reply in replies)
        for (text, most), reply in zip(ROWS, replies, strict=True):
            assert joined(reply.text) == whole.text([{"role": "user", "content": text}], most)
        for question in ("Hello!", "And what is the capital of Peru?"):
            messages = dialogue(question)
            reply = await ask(ring, messages, max_tokens=60)
            assert joined(reply.text) == whole.text(messages, 60)
        cached = []
        for last in ("Who are you?", "Who is that?", "Why?"):  # where the first turn ended, each begins anew
            messages = dialogue("What is the capital of Kenya? " * 3, "Nairobi.", last)
            reply = await ask(ring, messages, max_tokens=12)
            assert joined(reply.text) == whole.text(messages, 12)
            cached.append(reply.cached)
        assert min(cached[1:]) >= 64
    whole.tokenizer.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
async def test_tensor_rings_of_two(tmp_path, family):
    """As in a pipeline; llama's is in every run."""
    await _answers_as_whole(tmp_path, family, stages=2, strategy="tensor", clear_links=True)
