"""Asks nodes for their profiles of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.planning.demand import check_profile
from sealring.coordinator.planning.older import read_profile
from sealring.mesh.errors import DeadlineExceeded, NotFound, SealringError, Unavailable
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import membership_pb2, model_pb2

_SHOWN = 8
_RETRY_SECONDS = 15


@dataclass(frozen=True)
class ProfileReply:
    """A node's profile of a model, or why it has none."""

    member: str
    profile: model_pb2.ModelProfile | None
    error: SealringError | None

    @property
    def would_fetch(self) -> bool:
        """Whether the node lacks the model, and would get it from a member that has it."""
        return isinstance(self.error, NotFound) and self.error.metadata.get("fetchable") == "yes"

    @property
    def lacks_model(self) -> bool:
        """Whether it would fetch the model itself, and not an adapter alone."""
        return self.would_fetch and self.error is not None and self.error.reason != "ADAPTER_NOT_FOUND"

    @property
    def undecided(self) -> bool:
        """Whether the node may have the model: it did not answer, or could not read its folders."""
        return isinstance(self.error, Unavailable | DeadlineExceeded) or (
            self.error is not None and self.error.reason == "MODEL_FOLDER_UNREADABLE"
        )


class Profiles:
    """Profiles of models as nodes measure them."""

    def __init__(self, questions: Questions, *, timeout: float) -> None:
        """`timeout` is in seconds, for each node."""
        self._questions = questions
        self._timeout = timeout

    async def ask(
        self, model: str, members: Iterable[str], ranks: int = 0, draft: str = "", adapter: str = ""
    ) -> dict[str, ProfileReply]:
        """Each member's reply, by its id. A member that is offline or silent for the timeout gets an error.

        With several `ranks` a profile holds the part of each layer that one of them has. With `draft` it has
        the profile of that draft model, too, where the member has that model. `adapter` tunes the model.
        """
        asked = membership_pb2.ProfileRequest(model=model, ranks=ranks, draft=draft, adapter=adapter)
        answers = await asyncio.gather(*(self._ask_one(member, asked) for member in members))
        return {answer.member: answer for answer in answers}

    async def _ask_one(self, member: str, asked: membership_pb2.ProfileRequest) -> ProfileReply:
        try:
            async with asyncio.timeout(self._timeout):
                result = await self._questions.ask(member, asked, membership_pb2.ProfileResult)
            if result.HasField("problem"):
                return ProfileReply(member, None, from_problem(result.problem))
            read_profile(result.profile)
            check_profile(result.profile)
        except TimeoutError:
            return ProfileReply(member, None, DeadlineExceeded(f"no answer in {self._timeout:g} s"))
        except SealringError as error:
            return ProfileReply(member, None, error)
        return ProfileReply(member, result.profile, None)


def nobody_has(model: str, answers: Iterable[ProfileReply], names: dict[str, str]) -> SealringError:
    """The error for a model of which no node gave a profile, with each node's reason.

    Unavailable (NODES_SILENT) if one of them may have it, the error of a draft model that does not suit
    (DRAFT_*), else NotFound (UNKNOWN_MODEL). The hint is that of a node whose copy is unusable, if any."""
    answers = list(answers)
    errors = [(answer.member, answer.error) for answer in answers if answer.error is not None]
    said = "; ".join([f"{names.get(member, member)}: {error.message}" for member, error in errors][:_SHOWN])
    if any(answer.undecided for answer in answers):
        return Unavailable(
            f"no node that answered can serve the model {model[:256]!r} ({said})",
            hint="try again later; the cluster's operator finds more with: sealring status",
            reason="NODES_SILENT",
            retry_after=_RETRY_SECONDS,
        )
    if unfit := [error for _, error in errors if error.reason.startswith("DRAFT_")]:
        return unfit[0]
    hints = [error.hint for _, error in errors if error.reason != "MODEL_NOT_FOUND" and error.hint]
    hint, fetchable = (*hints, "put the model into the nodes' model folders, or name it as they do")[0], ""
    if "/" in model and any(answer.lacks_model for answer in answers):
        hint, fetchable = f"fetch it: sealring model pull {model[:256]}", "yes"
    return NotFound(
        f"no node can serve the model {model[:256]!r} ({said})",
        hint=hint,
        reason="UNKNOWN_MODEL",
        param="model",
        fetchable=fetchable,
    )
