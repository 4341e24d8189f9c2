"""What the forms of answers have in common."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

from sealring.api.errors import error_body
from sealring.mesh.errors import SealringError
from sealring.mesh.receipt.form import NAME, receipts_json
from sealring.v1 import inference_pb2 as inference

Logprobs: TypeAlias = Sequence[inference.TokenLogprob] | None

_REASONS = {inference.FINISH_REASON_STOP: "stop", inference.FINISH_REASON_LENGTH: "length"}
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class Choice:
    """One whole answer. Text, reasoning and calls are in the order in which `say` took them, or else the
    reasoning comes first and calls last."""

    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: list[inference.ToolCall] = field(default_factory=list)
    stop: str = ""
    """The stop string that ended it."""

    begun: int = 0
    """When its first piece came, in nanoseconds of the monotonic clock."""

    vector: array[float] = field(default_factory=lambda: array("f"))
    """In place of all else, of a prompt that asks for one."""

    logprobs: list[inference.TokenLogprob] = field(default_factory=list)
    logprobs_of_text: list[inference.TokenLogprob] = field(default_factory=list)
    """Those without the reasoning's and the calls'."""

    _order: list[tuple[str, int, int]] = field(default_factory=list)
    """The parts by kind, with their lengths, and how many `logprobs_of_text` had come at the end of each."""

    def add(self, delta: inference.Delta) -> None:
        """Takes the next piece in."""
        self.begun = self.begun or time.monotonic_ns()
        self.logprobs.extend(delta.logprobs)
        self.vector.extend(delta.parsed.vector)
        if of_text(delta):
            self.logprobs_of_text.extend(delta.logprobs)
        for kind, piece in pieces(delta):
            self.say(kind, piece)
        if delta.HasField("parsed"):
            if delta.parsed.reasoning:
                self.reasoning_tokens = delta.tokens
            self.stop = self.stop or delta.parsed.stop

    def say(self, kind: str, piece: str | inference.ToolCall) -> None:
        """Takes a piece in, as `pieces` names it; texts of one kind are joined with those before."""
        length = 0
        if isinstance(piece, inference.ToolCall):
            self.calls.append(piece)
        else:
            if kind == "text":
                self.text += piece
            else:
                self.reasoning += piece
            if self._order and self._order[-1][0] == kind:
                length = self._order.pop()[1]
            length += len(piece)
        self._order.append((kind, length, len(self.logprobs_of_text)))

    def parts(self) -> Iterator[tuple[str, str | inference.ToolCall, Logprobs]]:
        """Its parts in order: each a kind, the thing itself, and of a text the log-probabilities."""
        order, logged = list(self._order), len(self.logprobs_of_text)
        if not order:
            order += [("reasoning", len(self.reasoning), 0)] * bool(self.reasoning)
            order += [("text", len(self.text), logged)] * bool(self.text)
            order += [("call", 0, logged)] * len(self.calls)
        said, at, calls = {"text": 0, "reasoning": 0}, 0, iter(self.calls)
        for number, (kind, length, end) in enumerate(order, 1):
            if kind == "call":
                yield kind, next(calls), ()
                at = end
                continue
            start, whole = said[kind], self.text if kind == "text" else self.reasoning
            said[kind] += length
            end = logged if number == len(order) else end
            yield kind, whole[start : said[kind]], self.logprobs_of_text[at:end] if kind == "text" else ()
            at = end if kind == "text" else at


@dataclass(frozen=True)
class Asked:
    """What a client has asked, and the form in which it wants its answer."""

    request: inference.GenerateRequest
    render: Callable[[inference.Started], Renderer]
    stream: bool = False
    user: str = ""
    """The end user, as the client names it."""

    others: tuple[inference.GenerateRequest, ...] = ()
    """More prompts, whose answers follow those of `request`."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The client's own names of fields that errors name (fields.renamed)."""

    loads: bool = False
    """It asks for the model to be loaded, or with a `keep_alive` of 0 unloaded, and for nothing else."""

    at_once: int = 0
    """Prompts that are asked at the same time, at most; 0: all."""

    @property
    def choices(self) -> int:
        """Answers to all prompts."""
        return self.request.choices * (1 + len(self.others))


class Renderer:
    """The answers to one request as the bytes of one API: `whole`, or as a stream of events."""

    media_type = "text/event-stream"

    ping = b": keep-alive\n\n"
    """Sent while there is nothing to tell."""

    def prefilling(self, told: inference.Prefilling) -> bytes:
        """Sent in its place while a long prompt is computed: for people, as clients pass comments over."""
        left = f", {told.seconds_left} s left" if told.seconds_left else ""
        if self.media_type != Renderer.media_type:
            return self.ping
        return f": prompt {told.done} of {told.prompt_tokens} tokens{left}\n\n".encode() + self.ping

    def __init__(self, started: inference.Started) -> None:
        self.request_id = started.request_id

    def common(self, started: inference.Started, prefix: str, kind: str) -> dict[str, Any]:
        """The fields that all of OpenAI's events of one answer share."""
        return {
            "id": f"{prefix}-{started.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": started.model,
            "system_fingerprint": _fingerprint(started),
        }

    def first(self) -> bytes:
        """What opens the stream."""
        return b""

    def delta(self, delta: inference.Delta) -> bytes:
        raise NotImplementedError

    def last(self, finished: inference.Finished) -> bytes:
        """What ends the stream."""
        raise NotImplementedError

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        """All answers in one piece."""
        raise NotImplementedError

    def error(self, error: SealringError) -> bytes:
        """What ends the stream where the answer breaks off; clients raise on it."""
        return event(error_body(error))

    @staticmethod
    def reasons(finished: inference.Finished) -> list[str]:
        """`stop` or `length`, of each answer; an end without a list of them is that of one."""
        ends = [end.reason for end in finished.choices] or [finished.reason]
        return [_REASONS.get(reason, "stop") for reason in ends]


def receipt_of(finished: inference.Finished) -> dict[str, Any]:
    """The field with the receipts of an answer, where they were asked for; clients that know none skip it."""
    return {NAME: receipts_json(finished.receipts)} if finished.receipts else {}


def of_text(delta: inference.Delta) -> bool:
    """Whether the tokens of a delta are the answer's text, which may come with a later one."""
    return bool(delta.text) or not (delta.parsed.reasoning or delta.parsed.tool_calls)


def pieces(delta: inference.Delta) -> Iterator[tuple[str, str | inference.ToolCall]]:
    """What a delta tells, in order: each a kind (reasoning, text, call) and the thing itself."""
    if delta.parsed.reasoning:
        yield "reasoning", delta.parsed.reasoning
    if delta.text:
        yield "text", delta.text
    for call in delta.parsed.tool_calls:
        yield "call", call


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def call_id(request_id: str, choice: int, number: int, call: inference.ToolCall) -> str:
    """The model's own name for a call, or one of nine letters and digits: some templates take no others."""
    if call.id:
        return call.id
    digest = hashlib.blake2b(f"{request_id} {choice} {number}".encode(), digest_size=9).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def usage_of(finished: inference.Finished, thought: int = 0) -> dict[str, object]:
    """Usage in OpenAI's form; `thought` counts the tokens of reasoning.

    Tokens that were guessed wrong are not among the others: they cost nothing.
    """
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": finished.accepted_tokens,
            "rejected_prediction_tokens": finished.drafted_tokens - finished.accepted_tokens,
            "reasoning_tokens": thought,
        },
    }


def usage_so_far(prompt_tokens: int, tokens: Iterable[int]) -> dict[str, object]:
    """vLLM's form of `continuous_usage_stats`. A sealed prompt's length is known at the end only."""
    told = sum(tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": told,
        "total_tokens": prompt_tokens + told,
    }


def model_object(model: inference.Model) -> dict[str, Any]:
    """A model in the forms of OpenAI and Anthropic, with what is particular to this cluster beside them."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sealring",
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "model_type": model.model_type,
        "context_length": model.context,
        "min_trust": model.min_trust,
        "rings": model.rings,
        "rows": model.rows,
        "state": state_of(model),
        "aliases": list(model.aliases),
        "capabilities": list(model.capabilities),
        **({"digest": model.digest} if model.digest else {}),
        **told(model),
        **({"expires": model.expires} if model.expires else {}),
    }


def model_list(models: Sequence[inference.Model]) -> dict[str, Any]:
    """The list in both forms, which differ in their names alone; Codex wants a list `models` too."""
    found = [model_object(model) for model in models]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
    return {"object": "list", "data": found, "has_more": False, **ends, "models": []}


def told(model: inference.Model) -> dict[str, Any]:
    """What is said of a model that is being loaded or makes room, and the share that is loaded."""
    return {
        **({"reason": model.reason} if model.reason else {}),
        **({"progress": model.progress / 100} if model.progress else {}),
    }


_STATES = {
    inference.MODEL_AVAILABILITY_LOADED: "loaded",
    inference.MODEL_AVAILABILITY_LOADING: "loading",
    inference.MODEL_AVAILABILITY_NOT_LOADED: "not loaded",
}


def state_of(model: inference.Model) -> str:
    """`loaded`, `loading`, `not loaded` for a model that the first request loads, or `down`."""
    # a gateway of an earlier release names no availability
    return _STATES.get(model.availability, "loaded" if model.rings else "down")


def _fingerprint(started: inference.Started) -> str:
    """Changes when another ring or model answers."""
    return "fp_" + hashlib.sha256(f"{started.model}\x00{started.ring}".encode()).hexdigest()[:12]
