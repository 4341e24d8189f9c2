"""The questions of users, checked before anything is sent."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.options import SamplingOptions
from sealring.mesh.prompt.validate import validate_prompt, validate_prompt_cache_key
from sealring.mesh.receipt.statement import check_nonce
from sealring.mesh.ring.routing import routing_key
from sealring.v1 import inference_pb2 as inference

MAX_TIMEOUT_SECONDS = 3600
"""The longest time that a question may take. Its envelope lives for minutes; a question that waits longer is
sealed anew."""

Content: TypeAlias = str | Sequence[str | bytes]
"""A text, or texts and images in their order: the bytes of a PNG, JPEG, WebP or GIF file are an image."""

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat: `{"role": "system" | "user" | "assistant", "content": "..."}`. A user may show images:
`{"role": "user", "content": ["What is in this picture?", image]}`. An assistant's may have the `tool_calls`
of a reply; a tool's, `{"role": "tool", "tool_call_id": "...", "content": "..."}`, answers one of them."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that the model may call: `{"name": "...", "description": "...", "parameters": JSON schema}`, of
which only the name is needed, or the same as OpenAI has it, below "function"."""

_MORE = {"tool_calls", "tool_call_id"}


@dataclass(frozen=True, repr=False)
class Question:
    """A prompt and how to answer it. `timeout` in seconds.

    `request` has the model that was asked for and the numbers of the request (mesh/prompt/numbers.py).
    `prefix_salt` is secret: prompts sealed with the same one may share kept prefixes at the head.
    `routing_key` is the key by which the ring is chosen (mesh.ring.routing), or empty; it stays here.
    """

    prompt: inference.Prompt
    request: inference.GenerateRequest
    timeout: float
    prefix_salt: bytes
    routing_key: bytes = b""
    receipt_nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """What the members that answer sign beside the answer, so that nobody can show their receipts for another
    question."""

    def __post_init__(self) -> None:
        """Raises InvalidInput: BAD_TIMEOUT, and those of validate_prompt."""
        validate_prompt(self.prompt)
        check_nonce(self.receipt_nonce)
        if not 0 < self.timeout <= MAX_TIMEOUT_SECONDS:
            raise InvalidInput(
                "timeout is out of bounds",
                hint=f"give seconds, at most {MAX_TIMEOUT_SECONDS}",
                reason="BAD_TIMEOUT",
                param="timeout",
            )


def routing_key_of(secret: bytes, key: str | None, prompt: inference.Prompt) -> bytes:
    """The key by which the ring is chosen. Raises InvalidInput (BAD_PROMPT_CACHE_KEY, BAD_UTF8)."""
    if key is not None:
        validate_prompt_cache_key(_text(key, "prompt_cache_key"), sealed=False)
    return routing_key(secret, "", key, prompt)


def chat_prompt(messages: Messages | str, tools: Tools = ()) -> inference.Prompt:
    """A chat; a text is a user's message. Raises InvalidInput (BAD_MESSAGE) for a message without role or
    content, or with anything else, and BAD_TOOL."""
    prompt = inference.Prompt()
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if (
            set(message) - _MORE != {"role", "content"}
            or not isinstance(role, str)
            or not _is_content(content)
        ):
            raise InvalidInput(
                "a message is not a role and a content",
                hint='give messages as {"role": "user", "content": "..."}',
                reason="BAD_MESSAGE",
                param=param,
            )
        said = prompt.chat.messages.add(role=_text(role, f"{param}.role"))
        _add_calls(said, message, param)
        for part in [content] if isinstance(content, str) else content or ():
            if isinstance(part, str):
                said.content += _text(part, f"{param}.content")
            else:
                said.images.add(data=part, at=len(said.content))
    for index, tool in enumerate(tools):
        _add_tool(prompt.chat, tool.get("function", tool), f"tools[{index}]")
    return prompt


def _add_calls(said: inference.ChatMessage, message: Mapping[str, Any], param: str) -> None:
    try:
        said.tool_call_id = _text(message.get("tool_call_id", ""), param)
        for call in message.get("tool_calls", ()):
            said.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    except (TypeError, AttributeError):
        raise InvalidInput(
            "what a message says of tool calls is malformed",
            hint="give the tool_calls of a reply, and the id of one of them in tool_call_id",
            reason="BAD_MESSAGE",
            param=param,
        ) from None


def _add_tool(chat: inference.Chat, function: Any, param: str) -> None:
    try:
        parameters = function.get("parameters")
        added = chat.tools.add(name=function["name"], description=function.get("description", ""))
        added.parameters = json.dumps(parameters) if parameters else ""
    except (TypeError, ValueError, LookupError, AttributeError):
        raise InvalidInput(
            "a tool is not a name, a description and a JSON schema",
            hint='give tools as {"name": "...", "description": "...", "parameters": {"type": "object", ...}}',
            reason="BAD_TOOL",
            param=param,
        ) from None


def _is_content(content: Content | None) -> bool:
    if isinstance(content, list | tuple):
        return all(isinstance(part, str | bytes) for part in content)
    return isinstance(content, str)


def text_prompt(text: str) -> inference.Prompt:
    """A text to be completed as it stands."""
    return inference.Prompt(text=_text(text, "prompt"))


def set_sampling(prompt: inference.Prompt, options: SamplingOptions) -> None:
    """Fills in the rest of a prompt.

    Raises InvalidInput (BAD_SAMPLING) for numbers that do not fit, TypeError for an option that there is not.
    """
    if unknown := options.keys() - SamplingOptions.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    stop = options.get("stop", ())
    prompt.stop.extend(_text(one, "stop") for one in ([stop] if isinstance(stop, str) else stop))
    for name, value in options.items():
        if value is not None and name != "stop":
            _set(prompt.sampling, name, value)


def _set(sampling: inference.Sampling, name: str, value: Any) -> None:
    try:
        if name == "logit_bias":
            sampling.logit_bias.update(value)
        elif name == "stop_token_ids":
            sampling.stop_token_ids.extend(value)
        else:
            setattr(sampling, name, value)
    except (ValueError, TypeError, AttributeError):
        raise InvalidInput(f"{name} is not a number that fits", reason="BAD_SAMPLING", param=name) from None


def _text(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{param} holds half a surrogate pair", reason="BAD_UTF8", param=param) from None
    return text
