"""What a client asks for and gets: the options of a question, pieces of text, a finished answer, its ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sealring.mesh.prompt.numbers import RequestNumbers
from sealring.mesh.prompt.options import SamplingOptions
from sealring.mesh.roster import model as rosters
from sealring.mesh.trust.levels import SCORES, level_of, parse_level
from sealring.v1 import inference_pb2 as inference
from sealring.v1.model_pb2 import ModelCard

FinishReason: TypeAlias = Literal["stop", "length"]
"""`stop`: the model or a stop string ended the answer; `length`: max_tokens, the context, or memory did."""


class Trust(int):
    """A trust level: the score of docs/trust.md, so that levels compare, shown by its name."""

    def __new__(cls, level: int | str) -> Trust:
        """From a score, or a name as `software`. Raises AttestationError (UNKNOWN_TRUST_LEVEL)."""
        return super().__new__(cls, SCORES[parse_level(level)] if isinstance(level, str) else level)

    def __repr__(self) -> str:
        return level_of(int(self))

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return format(str(self), form)


@dataclass(frozen=True)
class Member:
    """A member of a ring: it holds layers [first, end) and sees what they compute on."""

    id: str
    rank: int
    layers: tuple[int, int]
    trust: Trust
    level: str
    """How it is attested: software, self_signed (by its own claim) or hardware."""


@dataclass(frozen=True)
class Ring:
    """A ring by a roster that the client has verified: its `members`, in the order of ranks, see prompts.

    The first member, the head, sees the prompt and the answer; the last one samples the tokens. With
    `clear_links` (`deploy --strategy tensor`) what the members add up crosses the network in clear: nothing
    that is sealed, or that asks for any trust, is sent to it.
    """

    id: str
    deployment: str
    min_trust: Trust
    roster_version: int
    roster_hash: bytes
    members: tuple[Member, ...]
    clear_links: bool
    model_digest: str = ""
    """The digest in hex of the model's configuration, tokenizer and weights' headers."""

    @classmethod
    def from_roster(cls, ring: rosters.Ring, roster: rosters.Roster) -> Ring:
        """What a verified roster says of one of its rings."""
        return cls(
            id=ring.id,
            deployment=ring.deployment,
            min_trust=Trust(rosters.ring_min_trust(ring.members, roster.members)),
            roster_version=roster.version,
            roster_hash=roster.hash,
            members=tuple(_member(one, roster.member(one.id)) for one in ring.members),
            clear_links=ring.clear_links,
            model_digest=ring.model_digest.hex(),
        )


@dataclass(frozen=True, repr=False)
class TopLogprob:
    """A token that might have come, and the natural logarithm of its probability by the model."""

    id: int
    spelling: bytes
    logprob: float

    @property
    def token(self) -> str:
        """As text; U+FFFD for a part of a character."""
        return self.spelling.decode("utf-8", "replace")


@dataclass(frozen=True, repr=False)
class TokenLogprob(TopLogprob):
    """A token of an answer, or of its prompt, and the likeliest in its place, the likeliest first."""

    top: tuple[TopLogprob, ...]
    prompt: bool = False

    @classmethod
    def from_message(cls, token: inference.TokenLogprob) -> TokenLogprob:
        """The token of a message of the contract."""
        top = tuple(TopLogprob(each.id, each.spelling, each.logprob) for each in token.top)
        return cls(token.id, token.spelling, token.logprob, top, token.prompt)


@dataclass(frozen=True, repr=False)
class ToolCall:
    """A call of a function; `arguments` is a JSON object. `id` is empty where the model gives none."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, repr=False)
class Delta:
    """The next piece of an answer; `tokens` counts all that were generated so far of its `choice`, from 0.

    `logprobs` has the tokens that were generated, where the question asked for them. `reasoning` comes before
    the text, `tool_calls` after it. `stop` is the stop string that ended the answer. A `vector` is the whole
    answer.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop: str = ""
    vector: tuple[float, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, with its template, and of the answer.

    By the word of the gateway `cached_tokens` of the prompt were not computed anew, and `drafted_tokens` were
    guessed, of which `accepted_tokens` were right: those are among the answer's.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, repr=False)
class Choice:
    """One of the answers to a question that asked for several."""

    text: str
    finish_reason: FinishReason
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, repr=False)
class Completion:
    """A finished answer: the first of `choices`, mostly the only one. `usage` counts the tokens of all."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    model: str
    request_id: str
    ring: Ring
    logprobs: tuple[TokenLogprob, ...] = ()
    choices: tuple[Choice, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    receipts: tuple[inference.Receipt, ...] = ()
    """What head and tail have signed for each choice. The client has checked it; one that `missing` says why
    it is not there (docs/receipts.md)."""


@dataclass(frozen=True)
class Model:
    """A model that can be asked for: by the verified roster, or by the gateway if it is not loaded.

    `min_trust` is that of the weakest ring; `context` counts tokens. By the word of the gateway: how many
    `rings` serve just now, with how many `rows` together, the model's architecture, and what it can do beside
    answering (`tools`, `thinking`).
    """

    name: str
    context: int
    min_trust: Trust
    rings: int
    model_type: str = ""
    rows: int = 0
    capabilities: tuple[str, ...] = ()
    availability: int = inference.MODEL_AVAILABILITY_UNSPECIFIED
    """Whether it is loaded (a ModelAvailability). The gateway reports this and the fields below; no roster
    confirms them."""

    aliases: tuple[str, ...] = ()
    expires: int = 0
    memory: int = 0
    reason: str = ""
    progress: int = 0
    card: ModelCard = field(default_factory=ModelCard)
    digest: str = ""
    """The digest in hex of its configuration, tokenizer and weights' headers. It is from the verified roster
    if that holds the model, and otherwise from the gateway."""


def _member(place: rosters.RingMember, member: rosters.RosterMember) -> Member:
    return Member(place.id, place.rank, place.layers, Trust(member.trust), str(member.level))


class RequestOptions(RequestNumbers, total=False):
    """The model, the bounds and the place in the queue of a question."""

    model: str
    """The deployment's name; empty for the only one."""
    timeout: float | None
    """Seconds, at most 3600; None: the client's."""
    prompt_cache_key: str | None
    """Questions with the same key go to the same ring, unless it is too busy. None: the key is derived from
    the beginning of the conversation; empty: the least busy ring answers. The key stays in this process."""
    receipt_nonce: bytes
    """16 to 64 bytes in the receipt of the answer, which tie it to something of the caller's. By default 32
    random bytes."""


class Options(RequestOptions, SamplingOptions, total=False):
    """All options of a chat or a completion."""

    prediction: str
    """What the answer will mostly be, at most 256 KiB: guesses, which make it faster and change nothing."""
