"""Actions that the scheduler asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from sealring.gateway.scheduler.request import Request
from sealring.mesh.errors import SealringError
from sealring.mesh.ring.prefix_names import Chain
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference


class OpenRow(NamedTuple):
    """Give the request to the head under this row number; one of its answers where there is a `resume`."""

    row: int
    request: Request
    resume: inference.Resume | None = None


class DiscardRow(NamedTuple):
    """Tell the head that an opened row will not be used."""

    row: int


class RecallBlocks(NamedTuple):
    """Have every member read blocks of a row's prompt from disk; with an empty chain, forget what it read."""

    number: int
    chain: Chain
    row: int


class AnnounceStep(NamedTuple):
    """Send the step to every member."""

    step: control.Step


class SignRow(NamedTuple):
    """Have the members sign for a row that has ended, before it is evicted.

    Its answer has `tokens` tokens; 0: the gateway has ended it by itself, which the head does not know.
    """

    row: int
    tokens: int


class Pause(NamedTuple):
    """The request gives way: it is computed no longer, until it is opened again."""

    request: Request


class Begin(NamedTuple):
    """The head has read the prompt."""

    request: Request
    prompt_tokens: int


Piece: TypeAlias = tuple[Request, inference.Delta, Sequence[inference.TokenLogprob]]
"""A delta of one request, and the log-probabilities that its head still holds back."""


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


class EndEpoch(NamedTuple):
    """The epoch must end with this error: members would refuse what was planned, which is a fault of the
    gateway."""

    error: Exception


Action: TypeAlias = (
    OpenRow
    | DiscardRow
    | RecallBlocks
    | AnnounceStep
    | SignRow
    | Begin
    | Deliver
    | Pause
    | Finish
    | Fail
    | EndEpoch
)
