"""A chat of the contract at the head: to tokens, and how its answer is to be divided."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sealring.mesh.errors import FailedPrecondition, InvalidInput
from sealring.mesh.prompt.tools import parse_json_object
from sealring.node.engine.text.detokenizer import StopStrings
from sealring.node.engine.text.marked import refuse_lost
from sealring.node.engine.text.sections import Sections, no_tool_calls
from sealring.node.engine.text.showing import Shown
from sealring.node.engine.text.thinking import Budget
from sealring.node.engine.text.tokenizer import Tokenizer, cannot_continue
from sealring.v1 import inference_pb2 as inference


def encode_chat(tokenizer: Tokenizer, chat: inference.Chat, shown: Shown | None = None) -> list[int]:
    """The tokens of a chat, with its images if it has `shown` ones; where a call is required the answer has
    begun with one.

    Raises InvalidInput: NO_TOOL_CALLS, CHAT_TEMPLATE_LOSES, and those of `Tokenizer.encode_chat`.
    """
    call = _required_call(tokenizer, chat)
    _check_begun(tokenizer, chat)
    shape = tokenizer.shape
    refuse_lost(chat, shape)
    described = [tool for tool in chat.tools if not tool.in_conversation]
    arguments = tokenizer.thinking.arguments(_arguments(chat))
    told, tools, variables = shape.chat(chat.messages, described)
    ids = tokenizer.encode_chat(told, tools, {**variables, **arguments}, shown, begun=chat.begun)
    if call:
        begin, end = tokenizer.format.thinking or ("", "")
        said = tokenizer.last_turn(ids)
        thinks = begin and said.rfind(begin) > said.rfind(end)
        ids += tokenizer.encode_markers((f"{end}\n\n" if thinks else "") + call)
    return ids


def _check_begun(tokenizer: Tokenizer, chat: inference.Chat) -> None:
    """Refuses an answer that nobody has begun, or that the model cannot go on with. Raises InvalidInput
    (CANNOT_CONTINUE)."""
    if not chat.begun:
        return
    last = chat.messages[-1] if chat.messages else inference.ChatMessage()
    if last.role != "assistant" or last.tool_calls or not last.content or chat.call_required:
        raise cannot_continue("only an answer of text can be continued, and not with a call that is required")
    if tokenizer.format.final:
        raise cannot_continue("this model's answers are of messages")


def sections_of(
    tokenizer: Tokenizer, prompt: inference.Prompt, ids: Sequence[int], stops: StopStrings
) -> Sections | None:
    """How the answer to a prompt of these tokens is divided; None where it is all text. `stops` end it."""
    if prompt.WhichOneof("input") != "chat" or not tokenizer.format:
        return None
    special = frozenset(tokenizer.special.values())
    said, held = tokenizer.last_turn(ids), bool(prompt.schema)
    return Sections(tokenizer.format, special, prompt.chat, said, stops, held=held)


def budget_of(
    tokenizer: Tokenizer, chat: inference.Chat, special: Callable[[], Mapping[int, str]], room: int
) -> Budget | None:
    """The budget of thoughts in an answer of at most `room` tokens; None for any number. `special` gives the
    tokens that a grammar knows as tokens.

    An effort that cannot be held is for the template alone. Raises InvalidInput (NO_THINKING_BUDGET) for a
    number that cannot.
    """
    told, marks = _arguments(chat), tokenizer.format.thinking
    most = tokenizer.thinking.budget(told)
    if most is None or most >= room or marks is None:
        return None
    begin, end = map(tokenizer.encode_markers, marks)
    with contextlib.suppress(FailedPrecondition):
        if end[0] in special():
            return Budget(most, begin, end)
    if "thinking_budget" not in told:
        return None
    raise InvalidInput(
        "the thoughts of this model cannot be bounded: no token of their own ends them",
        hint="leave the budget out, and bound the answer by max_tokens",
        reason="NO_THINKING_BUDGET",
        param="thinking_budget",
    )


def _arguments(chat: inference.Chat) -> dict[str, Any]:
    return parse_json_object(chat.template_arguments, "chat_template_kwargs")


def _required_call(tokenizer: Tokenizer, chat: inference.Chat) -> str:
    """The beginning of a call, if the answer has to be one; else nothing. Raises InvalidInput
    (NO_TOOL_CALLS)."""
    if not chat.call_required:
        return ""
    if tokenizer.format.call is None:
        raise no_tool_calls()
    return tokenizer.format.call[0]
