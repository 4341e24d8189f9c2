"""Actions that the scheduler asks for, and the facts of a ring that it schedules by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from sealring.gateway.scheduler.costs import StepCosts
from sealring.gateway.scheduler.request import Request
from sealring.mesh.errors import SealringError
from sealring.mesh.ring.composition import MAX_LANES, Origin
from sealring.mesh.ring.prefix_names import Names
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """KV memory of one member: bytes that its layers need, and its budget in bytes."""

    kv_bytes_per_token: int
    kv_bytes_per_row: int
    kv_budget: int


@dataclass(frozen=True, slots=True)
class RingFacts:
    """One epoch of a ring, as its roster and its members state it. `members` are in the order of ranks.

    `rows_in_turn`: on every member a step takes about as long as its rows would one after the other.
    `lockstep`: the members compute every step together, as one. `speculate`: the deployment wants
    drafts. `costs`: the cost table. `kept` are the prefixes of earlier epochs that every
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
        """Whether tokens are drafted: that cuts caches, as rows do that begin with a part of a prefix."""
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
    """The output of one step, for the requests that have some."""

    pieces: list[Piece]


class Finish(NamedTuple):
    """The request is complete; its client gets `finished`."""

    request: Request
    finished: inference.Finished


class Fail(NamedTuple):
    """The request ends with an error."""

    request: Request
    error: SealringError


Action: TypeAlias = OpenRow | DiscardRow | AnnounceStep | Begin | Deliver | Finish | Fail
