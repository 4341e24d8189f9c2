"""Log-probabilities in OpenAI's two forms: of chats, and the older one of completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from sealring.v1 import inference_pb2 as inference


class _Spelt(Protocol):
    @property
    def spelling(self) -> bytes: ...

    @property
    def logprob(self) -> float: ...


def chat_logprobs(tokens: Sequence[inference.TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. A token that is a part of a character has U+FFFD for a name."""
    content = [{**_named(one), "top_logprobs": [_named(each) for each in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _named(one: _Spelt) -> dict[str, Any]:
    return {
        "token": one.spelling.decode("utf-8", "replace"),
        "logprob": one.logprob,
        "bytes": list(one.spelling),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, piece by piece: offsets go on where the last piece ended.

    `likeliest` is how many were asked for; the sampled token is always among those told, unless it is 0.
    `echoed` is the prompt, where it is a text that the answer goes on with: tokens that its tokenizer added
    have no length in it. The first token of a prompt has no log-probability.
    """

    def __init__(self, likeliest: int, echoed: str = "") -> None:
        self._likeliest = likeliest
        self._echoed = echoed
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def __call__(self, tokens: Sequence[inference.TokenLogprob]) -> dict[str, Any]:
        bare = bool(tokens) and tokens[0].prompt
        told: list[float | None] = [one.logprob for one in tokens]
        top = [_top(one) for one in tokens] if self._likeliest else None
        return {
            "tokens": [_name(one) for one in tokens],
            "token_logprobs": [None, *told[1:]] if bare else told,
            "top_logprobs": [None, *top[1:]] if bare and top is not None else top,
            "text_offset": [self._advance(one) for one in tokens],
        }

    def _advance(self, one: inference.TokenLogprob) -> int:
        """The offset of the token in the text, in characters."""
        piece = self._decode(one.spelling)
        if self._echoed and one.prompt:
            rest = self._echoed[self._offset :]
            if not rest.startswith(piece):  # SentencePiece puts a space before a text
                piece = piece.lstrip() if rest.startswith(piece.lstrip()) else ""
        elif self._echoed and self._offset < len(self._echoed):
            self._offset = len(self._echoed)
        offset = self._offset
        self._offset += len(piece)
        return offset


def _top(one: inference.TokenLogprob) -> dict[str, float]:
    """The likeliest tokens by their text; of those with the same text, the likeliest alone."""
    found: dict[str, float] = {}
    for each in one.top:
        found.setdefault(_name(each), each.logprob)
    found.setdefault(_name(one), one.logprob)
    return found


def _name(one: _Spelt) -> str:
    """The token's text, or its bytes if it is a part of a character, as OpenAI writes them."""
    try:
        return one.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.spelling)
