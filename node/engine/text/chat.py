"""A chat of the contract at the head: to tokens, and how its answer is to be divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import parse_json_object
from sealring.node.engine.text.detokenizer import StopStrings
from sealring.node.engine.text.sections import Sections, no_tool_calls, parameters
from sealring.node.engine.text.showing import Shown
from sealring.node.engine.text.tokenizer import Tokenizer
from sealring.v1 import inference_pb2 as inference

_SEAM = "\n\n"
"""Between the contents of messages that become one."""


def encode_chat(tokenizer: Tokenizer, chat: inference.Chat, shown: Shown | None = None) -> list[int]:
    """The tokens of a chat, with its images if it has `shown` ones; where a call is required the answer has
    begun with one.

    Raises InvalidInput: NO_TOOL_CALLS, and those of `Tokenizer.encode_chat`.
    """
    call = _required_call(tokenizer, chat)
    described = [tool for tool in chat.tools if not tool.in_conversation]
    tools = [{"type": "function", "function": _function(tool)} for tool in described]
    arguments = parse_json_object(chat.template_arguments, "chat_template_kwargs")

    def encode(messages: Iterable[inference.ChatMessage]) -> list[int]:
        return tokenizer.encode_chat([_message(message) for message in messages], tools, arguments, shown)

    messages = in_turns(chat.messages)
    try:
        ids = encode(messages)
    except InvalidInput as error:
        by_tools = any(message.images for message in messages if message.role == "tool")
        if not by_tools or error.reason not in ("BAD_IMAGE", "CHAT_TEMPLATE_REFUSED"):
            raise
        ids = encode(behind_tools(messages))
    if call:
        begin, end = tokenizer.format.thinking or ("", "")
        said = tokenizer.last_turn(ids)
        thinks = begin and said.rfind(begin) > said.rfind(end)
        ids += tokenizer.encode_markers((f"{end}\n\n" if thinks else "") + call)
    return ids


def in_turns(messages: Iterable[inference.ChatMessage]) -> list[inference.ChatMessage]:
    """The messages as every template takes them: one system message, which is the first, and never two of a
    user in a row.

    What the system says later becomes the user's, at the same place. Many templates refuse anything else, and
    some leave it out without a word.
    """
    found: list[tuple[inference.ChatMessage, list[inference.ChatMessage]]] = []
    for message in messages:
        later = message.role == "system" and found and (len(found) > 1 or found[0][0].role != "system")
        role = "user" if later else message.role
        if found and found[-1][0].role == role and role in ("system", "user"):
            found[-1][1].append(message)
        else:
            said = inference.ChatMessage()
            said.CopyFrom(message)
            said.role = role
            found.append((said, [message]))
    for said, parts in found:  # joined once: a text that grew with each message would cost their square
        if len(parts) > 1:
            said.content = _SEAM.join(part.content for part in parts if part.content)
            _place(said, parts)
    return [said for said, _ in found]


def _place(said: inference.ChatMessage, parts: Iterable[inference.ChatMessage]) -> None:
    """Gives the message that was joined of `parts` their images."""
    del said.images[:]
    end = 0  # of the contents before
    for part in parts:
        begin = end + len(_SEAM) if end and part.content else end
        for image in part.images:
            moved = said.images.add()
            moved.CopyFrom(image)
            moved.at = begin + image.at
        end = begin + len(part.content)


def behind_tools(messages: Iterable[inference.ChatMessage]) -> list[inference.ChatMessage]:
    """The messages with the images of tools at the beginning of the user's message that follows, or in one of
    their own: many templates know images in messages of the user only."""
    found: list[inference.ChatMessage] = []
    waiting: list[inference.Image] = []

    def show(message: inference.ChatMessage) -> inference.ChatMessage:
        images = [inference.Image(data=each.data, low_detail=each.low_detail) for each in waiting]
        waiting.clear()
        said = inference.ChatMessage()
        said.CopyFrom(message)
        del said.images[:]
        said.images.extend([*images, *message.images])
        return said

    for message in messages:
        if message.role == "tool":
            waiting.extend(message.images)
            said = inference.ChatMessage()
            said.CopyFrom(message)
            del said.images[:]
            found.append(said)
            continue
        if waiting and message.role != "user":
            found.append(show(inference.ChatMessage(role="user")))
        found.append(show(message) if waiting else message)
    return [*found, show(inference.ChatMessage(role="user"))] if waiting else found


def sections_of(
    tokenizer: Tokenizer, prompt: inference.Prompt, ids: Sequence[int], stops: StopStrings
) -> Sections | None:
    """How the answer to a prompt of these tokens is divided; None where it is all text. `stops` end it."""
    if prompt.WhichOneof("input") != "chat" or not tokenizer.format:
        return None
    special = frozenset(tokenizer.special.values())
    return Sections(tokenizer.format, special, prompt.chat, tokenizer.last_turn(ids), stops)


def _required_call(tokenizer: Tokenizer, chat: inference.Chat) -> str:
    """The beginning of a call, if the answer has to be one; else nothing. Raises InvalidInput
    (NO_TOOL_CALLS)."""
    if not chat.call_required:
        return ""
    if tokenizer.format.call is None:
        raise no_tool_calls()
    return tokenizer.format.call[0]


def _message(message: inference.ChatMessage) -> dict[str, Any]:
    """As templates know messages, which are those of OpenAI but for the arguments: they are an object."""
    told: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
        if not (message.content and message.tool_calls):  # gpt-oss's template refuses both beside a call
            told["thinking"] = message.reasoning  # as gpt-oss's template names it
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.name,
                    "arguments": parse_json_object(call.arguments, "messages"),
                },
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            told[name] = value
    return told


def _content(message: inference.ChatMessage) -> str | list[dict[str, str]]:
    """The text, or where there are images a list of parts."""
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    begin = 0
    for image in message.images:
        if text := message.content[begin : image.at]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image"})
        begin = image.at
    rest = message.content[begin:]
    return [*parts, {"type": "text", "text": rest}] if rest else parts


def _function(tool: inference.Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": parameters(tool)}
