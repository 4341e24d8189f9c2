"""What goes into the scheduler and what it wants done. Nothing here looks into a prompt or an answer."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from sealring.gateway.scheduler.costs import StepCosts
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.ring.composition import MAX_LANES, Origin
from sealring.mesh.ring.prefix_names import Names
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

TOKEN_BYTES = 4 << 10
"""What a token brings, on the average of an answer's: its text, which may have been held back, with the
log-probabilities of 20 others. The longest tokens of common vocabularies spell 128 bytes."""

CHUNK_BYTES = (1 << 20) + (64 << 10)
"""A sealed chunk, or the log-probabilities of one message: 1 MiB, and what they are padded by."""


@dataclass(slots=True, eq=False)
class Answered:
    """How far one of a request's answers has come: the ids of its tokens (0 for each of a sealed one), and of
    the last ones, where they are held back, their log-probabilities."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    held: Sequence[inference.TokenLogprob] = ()
    end: inference.FinishedChoice | None = None
    spent: int = 0
    """Bytes that large outputs have brought."""

    pieces: int = 0
    """Deltas that another gateway has forwarded."""

    def spend(self, size: int, *, sealed: bool, tells: bool, held: int = 0) -> None:
        """Counts an output of `size` bytes with those of its log-probabilities that are held back, once its
        token is one of `tokens`.

        A prompt's own log-probabilities, with the first token, are as large as a chunk. Raises InvalidInput
        (BAD_STEP) for an output that cannot be.
        """
        if sealed:
            excess = size > CHUNK_BYTES
        else:
            self.spent += size - held
            most = TOKEN_BYTES * len(self.tokens) + CHUNK_BYTES * tells
            excess = self.spent > most or held > CHUNK_BYTES
        if excess:
            raise InvalidInput(f"a token brings {size} bytes", reason="BAD_STEP")


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way: what the gateway may know of it, and how far it got.

    `key` is who asks, for fairness, and `tenant` whose prompts may share prefixes with this one.
    `max_tokens` 0 means as many as the context holds. `answers` is how far its answers have come, from where
    a later epoch goes on. At the end of the last epoch `brought` counted the tokens of all of them and
    `attempts` the epochs in a row that had tried and brought no more than a first one; its client says that
    there were so many more of them as are `claimed`, under other ids. `cached` is what the first that brought
    one reused. Of the tokens `drafted` for it so many were `accepted`.

    `routing_key` is the key by which a ring is preferred for it (mesh.prompt.routing), or empty.

    `tells` is whether a prompt in clear asks for log-probabilities, which are looked at only then.

    `priority` orders the requests of one key, the lower the earlier; `patience` is how many seconds may pass
    before it is begun, from which `deadline` follows, and `due` its place among the others of its key.
    """

    id: str
    key: str
    max_tokens: int
    envelope: inference.Envelope = field(repr=False)
    deployment: str = ""
    tenant: str = ""
    choices: int = 1
    tells: bool = False
    routing_key: bytes = b""
    begun: bool = False
    attempts: int = 0
    claimed: int = 0
    brought: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    priority: int = 0
    patience: float = math.inf
    deadline: float = math.inf
    due: float | None = None
    answers: tuple[Answered, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.answers = tuple(Answered() for _ in range(self.choices))

    @property
    def sealed(self) -> bool:
        return self.envelope.WhichOneof("content") == "sealed"

    @property
    def tried(self) -> int:
        """Epochs in a row that have ended while they worked on it, here and where its client was before."""
        return self.attempts + self.claimed

    @property
    def resumes(self) -> bool:
        """Whether a head has had it before: to its client the end of that epoch is a pause."""
        return self.begun or self.attempts > 0

    @property
    def progress(self) -> int:
        """Tokens that this epoch has brought."""
        return sum(len(answer.tokens) for answer in self.answers) - self.brought

    @property
    def harmless(self) -> bool:
        """Whether this epoch has brought more than prefill does, which samples an answer's first token."""
        return self.progress > self.choices

    def broke(self, reused: int, *, tried: bool) -> None:
        """Its epoch has ended, in which so many tokens of its prompt were reused. `tried`: a member had it to
        work on when that happened. One that only waited for memory has ended nothing."""
        if not self.brought:
            self.cached = reused
        if self.harmless:
            self.attempts, self.claimed = 1, 0
        else:
            self.attempts += tried
        self.brought += self.progress


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """What one member's layers need for KV caches, and what the member may spend on them, in bytes."""

    kv_bytes_per_token: int
    kv_bytes_per_row: int
    kv_budget: int


@dataclass(frozen=True, slots=True)
class RingFacts:
    """One epoch of a ring, as its roster and its members state it. `members` are in the order of ranks.

    `rows_in_turn`: on every member a step takes about as long as its rows would one after the other.
    `lockstep`: the members compute every step together, as one. `speculate`: the deployment wants that tokens
    are guessed. `costs`: what steps were timed to take. `kept` are the prefixes of earlier epochs that every
    member still has, with their names in this epoch.
    """

    members: tuple[MemberMemory, ...]
    max_rows: int
    prefill_chunk: int
    prefixes: control.PrefixSupport.ValueType = control.PREFIX_SUPPORT_UNSPECIFIED
    rows_in_turn: bool = False
    speculate: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    kept: tuple[tuple[Origin, Names], ...] = ()
    lockstep: bool = False

    @property
    def stages(self) -> int:
        return 1 if self.lockstep else len(self.members)

    @property
    def speculates(self) -> bool:
        """Whether tokens are guessed: caches are cut then, as for rows that begin with a part of a prefix."""
        return self.speculate and self.stages > 1 and self.prefixes == control.PREFIX_SUPPORT_ANY

    @property
    def lanes(self) -> int:
        """Lanes that rows are spread over.

        One for each stage keeps all of them at work if steps take alike and the way to the next member no
        time. One more makes up for what is not so: it costs what a step takes besides its rows, so it is
        there only where that is little (docs/decisions/0011-one-lane-more-than-stages.md).
        """
        spare = self.rows_in_turn and self.stages > 1
        return min(self.stages + spare, MAX_LANES)


class OpenRow(NamedTuple):
    """Give the request to the head under this row number; one of its answers where there is a `resume`."""

    row: int
    request: Request
    resume: inference.Resume | None = None


class DiscardRow(NamedTuple):
    """Tell the head that an opened row will not be used."""

    row: int


class AnnounceStep(NamedTuple):
    """Send the step to every member."""

    step: control.Step


class Begin(NamedTuple):
    """The head has read the prompt."""

    request: Request
    prompt_tokens: int


Piece: TypeAlias = tuple[
    Request, str, bytes, int, Sequence[inference.TokenLogprob], int, inference.Parsed | None
]
"""Of one request: text, sealed, tokens, log-probabilities, choice.

Either sealed is not empty, or text or the log-probabilities are not; tokens counts all generated so far.
"""


class Deliver(NamedTuple):
    """What one step brought to the requests that have something to show."""

    pieces: list[Piece]


class Finish(NamedTuple):
    """The request is complete: `finished` is what its client is told."""

    request: Request
    finished: inference.Finished


class Fail(NamedTuple):
    """The request ends with an error."""

    request: Request
    error: SealringError


Action: TypeAlias = OpenRow | DiscardRow | AnnounceStep | Begin | Deliver | Finish | Fail
