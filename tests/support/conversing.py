"""A model that holds a conversation with tools: it calls the first one once, then tells what that gave."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from httpedge import ScriptedBackend
from scriptedgateway import ScriptedGateway

from sealring.v1 import inference_pb2 as inference

ARGUMENTS: dict[str, Any] = {"string": "Paris", "integer": 3, "number": 3.5, "boolean": True, "array": []}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command that ends mini-swe-agent's work."""


def said(chat: inference.Chat) -> tuple[str, inference.Parsed | None]:
    """What comes next: a text, or a thought with a call."""
    if chat.tools and all(one.role != "tool" for one in chat.messages):
        tool = chat.tools[0]
        known = json.loads(tool.parameters or "{}").get("properties", {})
        arguments = {name: ARGUMENTS.get(of.get("type", ""), "x") for name, of in known.items()}
        if "command" in arguments:
            arguments["command"] = SUBMIT
        call = inference.ToolCall(name=tool.name, arguments=json.dumps(arguments))
        return "", inference.Parsed(reasoning="I look.", tool_calls=[call])
    return f"It is so: {chat.messages[-1].content}", None


class ConversingBackend(ScriptedBackend):
    """Answers in clear."""

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        text, parsed = said(request.envelope.clear.chat)
        self.texts, self.parsed = [text], [parsed]
        async for event in super().generate(request, key=key, tenant=tenant):
            yield event


async def conversing(
    gateway: ScriptedGateway, request: inference.GenerateRequest
) -> AsyncIterator[inference.GenerateResponse]:
    """Answers what was sealed."""
    asked, sealer = gateway.open(request)
    text, parsed = said(asked.prompt.chat)
    yield inference.GenerateResponse(started=inference.Started(ring=request.envelope.sealed_for.ring))
    told = inference.SealedDelta(
        text=text, tokens=1, parsed=parsed, finish=inference.FINISH_REASON_STOP, prompt_tokens=7
    )
    sealed = sealer.seal(told.SerializeToString(), last=True)
    yield inference.GenerateResponse(delta=inference.Delta(sealed=sealed, tokens=1))
    yield inference.GenerateResponse(finished=inference.Finished(reason=inference.FINISH_REASON_STOP))
