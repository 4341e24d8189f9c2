"""Requests that begin alike: what is answered, by which ring, and how much of them was not computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
from ringtest import LIMIT_SECONDS, Ring

from sealring.mesh.rpc import from_rpc_error
from sealring.v1 import inference_pb2 as inference

SYSTEM = "You answer questions about the world in one short sentence and never more than that. " * 4
"""A little more than the 64 tokens by which prefixes are named; each of the others is computed every time."""


@dataclasses.dataclass(frozen=True)
class Answered:
    """`cached`: how many tokens of the prompt were not computed; `drafts`: guessed and right."""

    ring: str
    text: str
    prompt_tokens: int
    cached: int
    drafts: tuple[int, int] = (0, 0)


def dialogue(*contents: str) -> list[dict[str, str]]:
    """A chat that begins with what many begin with; user and assistant take turns."""
    roles = ("system", *("user", "assistant") * len(contents))
    return [{"role": role, "content": text} for role, text in zip(roles, (SYSTEM, *contents), strict=False)]


async def ask(
    ring: Ring,
    messages: list[dict[str, Any]],
    *,
    max_tokens: int = 8,
    key: str = "",
    sampling: inference.Sampling | None = None,
    **fields: Any,
) -> Answered:
    """With the ring's API key or another. Raises a SealringError for what the gateway refuses."""
    request = inference.GenerateRequest(model=ring.model, max_tokens=max_tokens, **fields)
    for message in messages:
        request.envelope.clear.chat.messages.add(**message)
    if sampling is not None:
        request.envelope.clear.sampling.CopyFrom(sampling)
    metadata = (("authorization", f"Bearer {key}"),) if key else ring.metadata()
    text, name = "", ""
    try:
        async for response in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=metadata):
            text += response.delta.text
            if response.HasField("started"):
                name = response.started.ring
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    end = response.finished
    return Answered(
        name, text, end.prompt_tokens, end.cached_tokens, (end.drafted_tokens, end.accepted_tokens)
    )
