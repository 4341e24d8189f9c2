"""A chat of the contract at the head: to tokens, and how its answer is to be divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sealring.mesh.prompt.tools import parse_json_object
from sealring.node.engine.text.sections import Sections, no_tool_calls, parameters
from sealring.node.engine.text.tokenizer import Tokenizer
from sealring.v1 import inference_pb2 as inference


def encode_chat(tokenizer: Tokenizer, chat: inference.Chat) -> list[int]:
    """The tokens of a chat; where a call is required the answer has begun with one.

    Raises InvalidInput: NO_TOOL_CALLS, and those of `Tokenizer.encode_chat`.
    """
    call = _required_call(tokenizer, chat)
    messages = [_message(message) for message in in_turns(chat.messages)]
    shown = [tool for tool in chat.tools if not tool.in_conversation]
    tools = [{"type": "function", "function": _function(tool)} for tool in shown]
    arguments = parse_json_object(chat.template_arguments, "chat_template_kwargs")
    ids = tokenizer.encode_chat(messages, tools, arguments)
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
    found: list[tuple[inference.ChatMessage, list[str]]] = []
    for message in messages:
        later = message.role == "system" and found and (len(found) > 1 or found[0][0].role != "system")
        role = "user" if later else message.role
        if found and found[-1][0].role == role and role in ("system", "user"):
            found[-1][1].append(message.content)
        else:
            said = inference.ChatMessage()
            said.CopyFrom(message)
            said.role = role
            found.append((said, [message.content]))
    for said, texts in found:  # joined once: a text that grew with each message would cost their square
        if len(texts) > 1:
            said.content = "\n\n".join(filter(None, texts))
    return [said for said, _ in found]


def sections_of(tokenizer: Tokenizer, prompt: inference.Prompt, ids: Sequence[int]) -> Sections | None:
    """How the answer to a prompt of these tokens is divided; None where it is all text."""
    if prompt.WhichOneof("input") != "chat" or not tokenizer.format:
        return None
    special = frozenset(tokenizer.special.values())
    return Sections(tokenizer.format, special, prompt.chat, tokenizer.last_turn(ids))


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
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
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


def _function(tool: inference.Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": parameters(tool)}
