"""The client library: prompts sealed to the head of a ring that the client has verified by itself.

    async with AsyncClient("127.0.0.1:7780", root_sha256="...", min_trust="self_signed") as client:
        async for delta in client.chat([{"role": "user", "content": "..."}], max_tokens=200):
            print(delta.text, end="")

The gateway between sees lengths and times; text and tokens it does not.
"""

from sealring.client.asynchronous import AsyncClient, AsyncReply
from sealring.client.synchronous import Client, Reply
from sealring.client.types import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    Member,
    Model,
    Ring,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Trust,
    Usage,
)
from sealring.mesh.prompt.options import SamplingOptions

__all__ = [
    "AsyncClient",
    "AsyncReply",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "FinishReason",
    "Member",
    "Model",
    "Reply",
    "Ring",
    "SamplingOptions",
    "TokenLogprob",
    "ToolCall",
    "TopLogprob",
    "Trust",
    "Usage",
]
