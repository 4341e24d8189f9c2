"""A whole cluster of real processes on loopback, and the whole model in plain mlx_lm to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from cli.cluster import LocalCluster
from sealring.v1 import inference_pb2, inference_pb2_grpc

MODEL = Path(__file__).parents[2] / "examples" / "demo_model" / "model"


@dataclasses.dataclass(frozen=True)
class Reply:
    text: str
    prompt_tokens: int
    completion_tokens: int
    reason: str


@dataclasses.dataclass
class Ring:
    """A serving cluster and a client of its gRPC edge."""

    cluster: LocalCluster
    deployment: Any
    stub: inference_pb2_grpc.InferenceStub

    async def ask(self, prompt: inference_pb2.Prompt, max_tokens: int = 0, **fields: Any) -> Reply:
        """The whole reply, from one streamed call."""
        request = inference_pb2.GenerateRequest(
            model="demo",
            envelope=inference_pb2.Envelope(clear=prompt),
            max_tokens=max_tokens,
            **fields,
        )
        text, finished = [], None
        async for response in self.stub.Generate(request, timeout=60):
            if response.HasField("delta"):
                text.append(response.delta.text)
            elif response.HasField("finished"):
                finished = response.finished
        assert finished is not None
        reason = inference_pb2.FinishReason.Name(finished.reason)
        return Reply("".join(text), finished.prompt_tokens, finished.completion_tokens, reason)


def chat(*contents: str, **sampling: Any) -> inference_pb2.Prompt:
    roles = ("user", "assistant")
    messages = [
        inference_pb2.ChatMessage(role=roles[number % 2], content=content)
        for number, content in enumerate(contents)
    ]
    return inference_pb2.Prompt(
        chat=inference_pb2.Chat(messages=messages), sampling=inference_pb2.Sampling(**sampling)
    )


@asynccontextmanager
async def serving(folder: Path, size: int, **spec: Any) -> AsyncIterator[Ring]:
    async with LocalCluster(folder, MODEL, nodes=size, name="demo") as cluster:
        await cluster.start()
        deployment = await cluster.deploy(stages=size, **spec)
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            yield Ring(cluster, deployment, inference_pb2_grpc.InferenceStub(channel))


class Reference:
    """The whole model in plain mlx_lm, greedy, one row."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm import load

        self.model, self.tokenizer = load(str(folder))

    def reply(self, messages: list[dict[str, str]], max_tokens: int, *, kv_bits: int = 0) -> Reply:
        """With `kv_bits` by mlx-lm's own quantized caches, from the first token on."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import QuantizedKVCache

        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens: list[int] = []
        reason = "FINISH_REASON_LENGTH"
        cache = [QuantizedKVCache(32, kv_bits) for _ in self.model.layers] if kv_bits else None
        for token, _ in generate_step(
            mx.array(prompt), self.model, max_tokens=max_tokens, prompt_cache=cache
        ):
            tokens.append(int(token))
            if token in self.tokenizer.eos_token_ids:
                reason = "FINISH_REASON_STOP"
                break
        shown = [token for token in tokens if token not in self.tokenizer.eos_token_ids]
        return Reply(self.tokenizer.decode(shown), len(prompt), len(tokens), reason)
