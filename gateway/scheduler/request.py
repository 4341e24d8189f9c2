"""A request in the gateway: what its client asked for, how far its answer has come, and its rows in a ring.

Nothing here looks into a prompt or an answer, but for whose message is the last of a prompt in clear.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.images import images_size
from sealring.mesh.ring.prefix_names import NO_CHAIN, Chain
from sealring.mesh.ring.unbroken import Unbroken
from sealring.v1 import inference_pb2 as inference

TOKEN_BYTES = 4 << 10
"""Bytes that a token may bring, on the average of its choice: its text, which may have been held back, with
the log-probabilities of 20 others. The longest tokens of common vocabularies spell 128 bytes."""

CHUNK_BYTES = (1 << 20) + (64 << 10)
"""A sealed chunk, or the log-probabilities of one message: 1 MiB and its padding."""


@dataclass(slots=True, eq=False)
class ChoiceProgress:
    """Tokens of one choice so far, from which a later epoch continues it.

    `tokens` are ids, 0 for each token of a sealed answer. `held` are the log-probabilities of the last ones
    while the head holds them back. `end` is set once the choice is complete.
    """

    tokens: array[int] = field(default_factory=lambda: array("I"))
    held: Sequence[inference.TokenLogprob] = ()
    end: inference.FinishedChoice | None = None
    spent: int = 0
    """Bytes of the large outputs so far."""

    pieces: int = 0
    """Deltas that another gateway has forwarded."""

    epochs: list[inference.EarlierEpoch] = field(default_factory=list)
    """Epochs that brought tokens of it, which receipts name; the last one may still go on."""

    def spend(self, size: int, *, sealed: bool, logprobs: bool, held: int = 0) -> None:
        """Counts an output of `size` bytes, of which `held` are log-probabilities that are held back.

        Its token is one of `tokens` already. A prompt's own log-probabilities, which come with the first
        token, are as large as a chunk. Raises InvalidInput (BAD_STEP) for a size that no honest head sends.
        """
        if sealed:
            excess = size > CHUNK_BYTES
        else:
            self.spent += size - held
            most = TOKEN_BYTES * len(self.tokens) + CHUNK_BYTES * logprobs
            excess = self.spent > most or held > CHUNK_BYTES
        if excess:
            raise InvalidInput(f"a token brings {size} bytes", reason="BAD_STEP")


@dataclass(slots=True, eq=False)
class Progress:
    """State of a request that changes while it waits, runs, and survives the ends of epochs.

    `due` is its place among the requests of its key, None before it is queued; `deadline` is the time at
    which it fails unless it runs by then. `started` is whether its client has the `Started` event, `begun`
    whether a ring has computed any of it.

    `attempts` counts the epochs in a row that ended while they computed the request and brought no more than
    first tokens; `claimed` are those that its client counted elsewhere, under other ids. `earlier_tokens` are
    the tokens of all choices at the end of the last epoch. `prompt_tokens` are 0 before a head has counted
    them, and `cached` are those that the first productive epoch reused. Of `drafted` tokens `accepted` were
    right.
    """

    choices: tuple[ChoiceProgress, ...] = field(repr=False)
    due: float | None = None
    deadline: float = math.inf
    started: bool = False
    begun: bool = False
    attempts: int = 0
    claimed: int = 0
    earlier_tokens: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    receipts: dict[int, inference.Receipt] = field(default_factory=dict)
    """By choice, as far as members have signed."""

    @property
    def all_attempts(self) -> int:
        """Attempts here and those that the client claims."""
        return self.attempts + self.claimed

    @property
    def resumes(self) -> bool:
        """Whether a head has had the request before: to its client the end of that epoch is a pause."""
        return self.started or self.attempts > 0

    @property
    def goes_on(self) -> bool:
        """Whether some of it has come before, by this gateway's count or the client's word."""
        return self.earlier_tokens > 0 or self.claimed > 0

    @property
    def answered(self) -> int:
        """Tokens of all choices that this gateway knows of."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def over(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.end is not None for choice in self.choices)

    @property
    def new_tokens(self) -> int:
        """Tokens that this epoch has brought."""
        return self.answered - self.earlier_tokens

    @property
    def harmless(self) -> bool:
        """Whether this epoch has brought more than prefill does, which samples first tokens."""
        return self.new_tokens > len(self.choices)

    def begin(self, reused: int) -> None:
        """Its prompt begins to be computed behind `reused` tokens of it."""
        self.begun = True
        if not self.earlier_tokens:
            self.cached = reused

    def pause(self) -> None:
        """It is computed no longer, and goes on with its tokens as an answer of an earlier epoch does."""
        if self.harmless:
            self.attempts, self.claimed = 1, 0
        self.earlier_tokens += self.new_tokens

    def end_epoch(self, *, computed: bool) -> None:
        """Counts the end of an epoch. `computed` is whether a member had the request to compute at that
        moment: one that only waited for memory has ended nothing."""
        if not self.harmless:
            self.attempts += computed
        self.pause()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a client asked for, as far as the gateway may know it, and its `progress`.

    `key` is the client, for fairness between clients; prompts of one `tenant` may share prefixes.
    `max_tokens` 0 means as many as the context holds. `logprobs` is whether a prompt in clear asks for
    log-probabilities, or for a vector: outputs are searched for them only then. `routing_key` prefers a ring
    (mesh.ring.routing), or is empty. Rings with less trust than `min_trust` do not get the request.

    `priority` orders the requests of one key, the lower the earlier. `patience` is the time in seconds after
    which the request fails unless it runs. `keep_alive` and `receipt` are GenerateRequest's, or None. `bulk`
    are the bytes of the images of a prompt in clear, and all bytes of a sealed one. An `idle` one is nobody's
    and is prefilled while its ring has nothing else to do.
    """

    id: str
    key: str
    max_tokens: int
    envelope: inference.Envelope = field(repr=False)
    deployment: str = ""
    tenant: str = ""
    choices: int = 1
    logprobs: bool = False
    routing_key: bytes = b""
    priority: int = 0
    patience: float = math.inf
    min_trust: int = 0
    keep_alive: int | None = None
    receipt: inference.ReceiptRequest | None = None
    idle: bool = False
    bulk: int = field(init=False)
    progress: Progress = field(init=False, repr=False)

    def __post_init__(self) -> None:
        progress = Progress(tuple(ChoiceProgress() for _ in range(self.choices)))
        object.__setattr__(self, "progress", progress)
        object.__setattr__(self, "bulk", len(self.envelope.sealed) or images_size(self.envelope.clear))

    @classmethod
    def of(
        cls,
        asked: inference.GenerateRequest,
        id: str,
        *,
        key: str,
        tenant: str,
        deployment: str,
        routing_key: bytes = b"",
    ) -> Request:
        """What a valid request asks for."""
        return cls(
            id,
            key,
            asked.max_tokens,
            asked.envelope,
            deployment,
            tenant,
            asked.choices or 1,
            asked.envelope.clear.sampling.HasField("logprobs") or asked.envelope.clear.HasField("pooled"),
            routing_key,
            asked.priority,
            asked.deadline_ms / 1e3 or math.inf,
            asked.min_trust,
            asked.keep_alive if asked.HasField("keep_alive") else None,
            asked.receipt if asked.HasField("receipt") else None,
        )

    @property
    def by_user(self) -> bool:
        """Whether a user asks, as far as is known: the prompt does not end with a tool's result."""
        messages = self.envelope.clear.chat.messages
        return not messages or messages[-1].role != "tool"

    @property
    def shows(self) -> bool:
        """Whether a prompt in clear has images."""
        return self.bulk > 0 and not self.sealed

    @property
    def sealed(self) -> bool:
        return self.envelope.WhichOneof("content") == "sealed"


@dataclass(slots=True, eq=False)
class Row:
    """A request in a ring, or one of its answers, from the moment it is given to the head until its eviction
    is announced.

    `limit` tokens may be generated with the memory that is reserved, `ceiling` at the very most.

    A row is `closed` once nothing more of it is wanted: finished, refused, cancelled. It is stepped on until
    its eviction is announced.

    A row has `begun` once its first chunk is announced, a copy with the last one. It begins with
    the first `reused` tokens of a kept `prefix`; `names` are of its prompt's prefixes, and chunks also end at
    `cuts`, and none inside an `unbroken` span, where no name is either. Where caches cannot be cut, `names`
    are also of the marks that it begins with, and of its answer's end. The last `answered` of its prompt's
    tokens are those of its answer that an earlier epoch brought.
    At most `drafts` tokens may be guessed in a step.

    A request for several answers has a row for each: one that is prefilled, and its `copies`, which become
    what it is when its prompt ends. Answers that an earlier epoch has begun have rows
    that are each prefilled.
    """

    number: int
    request: Request
    choice: int = 0
    closed: bool = False
    prompt_tokens: int = 0
    answered: int = 0
    earlier: int = 0  # answered tokens that only the client of a sealed prompt knows
    drafts: int = 0
    params_bytes: int = 0
    begun: bool = False
    unbroken: Unbroken = ()
    names: tuple[tuple[int, bytes], ...] = ()
    prefix: int = 0
    reused: int = 0
    continues: bool = False  # the conversation that its prefix was kept of
    cuts: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()  # the cuts up to which other prompts are the same
    awaits: Row | None = None  # that computes more of its prompt than is kept
    stored: int = 0  # tokens of its prompt that the head has on disk
    chain: Chain = NO_CHAIN  # of the stored tokens that members are still to be asked for
    question: tuple[int, bytes] = (0, b"")  # length and name behind what the user has asked last
    recalling: int = 0  # the number under which members read its beginning from disk, which it waits for
    limit: int = 0
    ceiling: int = 0
    copies: tuple[Row, ...] = ()
    progress: ChoiceProgress = field(init=False)  # a field, for it is read with every token of every row

    def __post_init__(self) -> None:
        self.progress = self.request.progress.choices[self.choice]

    @property
    def opening(self) -> bool:
        """Whether the head has not answered yet how long the prompt is."""
        return not self.prompt_tokens

    @property
    def group(self) -> tuple[Row, ...]:
        """All rows of the request, by choice; of a row that is prefilled."""
        return (self, *self.copies)

    @property
    def reserved(self) -> int:
        return self.prompt_tokens + self.limit
