"""Asks nodes what they measure of a model, and holds on to what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from sealring.coordinator.planning.demand import check_profile
from sealring.coordinator.streams.questions import Questions
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import DeadlineExceeded, NotFound, SealringError
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import membership_pb2, model_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage

_SHOWN = 8


@dataclass(frozen=True)
class Answer:
    """A node's profile of a model, or why it has none."""

    member: str
    profile: model_pb2.ModelProfile | None
    error: SealringError | None

    @property
    def would_fetch(self) -> bool:
        """Whether it does not have the model, and would get it from a member that does."""
        return isinstance(self.error, NotFound) and self.error.metadata.get("fetchable") == "yes"


class Profiles:
    """What nodes say of models."""

    def __init__(self, sessions: Sessions, *, timeout: float) -> None:
        self._timeout = timeout
        self._questions: Questions[membership_pb2.ProfileResult] = Questions(sessions)

    async def ask(self, model: str, members: Iterable[str], ranks: int = 0) -> dict[str, Answer]:
        """The answer of each member, within the timeout; who is not there or silent gets an error. With
        several `ranks` it is of what one of them holds of every layer."""
        answers = await asyncio.gather(*(self._ask_one(model, member, ranks) for member in members))
        return {answer.member: answer for answer in answers}

    def answered(self, session: NodeSession, result: membership_pb2.ProfileResult) -> None:
        """A node's answer has come."""
        self._questions.answered(session, result.id, result)

    def gone(self, session: NodeSession) -> None:
        """A node's stream has ended."""
        self._questions.gone(session)

    async def _ask_one(self, model: str, member: str, ranks: int) -> Answer:
        def question(number: int) -> CoordinatorMessage:
            request = membership_pb2.ProfileRequest(id=number, model=model, ranks=ranks)
            return CoordinatorMessage(profile=request)

        try:
            async with asyncio.timeout(self._timeout):
                result = await self._questions.ask(member, question)
            if result.HasField("problem"):
                return Answer(member, None, from_problem(result.problem))
            check_profile(result.profile)
        except TimeoutError:
            return Answer(member, None, DeadlineExceeded(f"no answer in {self._timeout:g} s"))
        except SealringError as error:
            return Answer(member, None, error)
        return Answer(member, result.profile, None)


def unknown_model(model: str, answers: Iterable[Answer], names: dict[str, str]) -> NotFound:
    """No node has the model; says what each of them answered, and what helps: against what is wrong with a
    model that is there, else against none."""
    answers = list(answers)
    errors = [(answer.member, answer.error) for answer in answers if answer.error is not None]
    told = [f"{names.get(member, member)}: {error.message}" for member, error in errors]
    hints = [error.hint for _, error in errors if error.reason != "MODEL_NOT_FOUND" and error.hint]
    hint, fetchable = "put the model into the nodes' model folders, or name it as they do", ""
    if hints:
        hint = hints[0]
    if "/" in model and any(answer.would_fetch for answer in answers):
        hint, fetchable = f"fetch it: sealring model pull {model[:256]}", "yes"
    return NotFound(
        f"no node can serve the model {model[:256]!r} ({'; '.join(told[:_SHOWN])})",
        hint=hint,
        reason="UNKNOWN_MODEL",
        param="model",
        fetchable=fetchable,
    )
