"""Asks nodes what they measure of a model, and holds on to what they answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.demand import check_profile
from coordinator.sessions import Sessions
from mesh.errors import DeadlineExceeded, NotFound, SealringError, Unavailable
from mesh.problem import from_problem
from sealring.v1 import membership_pb2, model_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage

_SHOWN = 8


@dataclass(frozen=True)
class Answer:
    """A node's profile of a model, or why it has none."""

    member: str
    profile: model_pb2.ModelProfile | None
    error: SealringError | None


class Profiles:
    """The questions that are open."""

    def __init__(self, sessions: Sessions, *, timeout: float) -> None:
        self._sessions = sessions
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._open: dict[tuple[str, int], asyncio.Future[Answer]] = {}

    async def ask(self, model: str, members: Iterable[str]) -> dict[str, Answer]:
        """The answer of each member, within the timeout; who is not there or silent gets an error."""
        answers = await asyncio.gather(*(self._ask_one(model, member) for member in members))
        return {answer.member: answer for answer in answers}

    def answered(self, member: str, result: membership_pb2.ProfileResult) -> None:
        """A node's answer has come; answers to questions that nobody asked are dropped."""
        waiting = self._open.get((member, result.id))
        if waiting is None or waiting.done():
            return
        if result.HasField("problem"):
            waiting.set_result(Answer(member, None, from_problem(result.problem)))
            return
        try:
            check_profile(result.profile)
        except SealringError as error:
            waiting.set_result(Answer(member, None, error))
        else:
            waiting.set_result(Answer(member, result.profile, None))

    def gone(self, member: str) -> None:
        """A node will not answer any more."""
        for (asked, _), waiting in self._open.items():
            if asked == member and not waiting.done():
                waiting.set_result(Answer(member, None, Unavailable("it went away")))

    async def _ask_one(self, model: str, member: str) -> Answer:
        key = (member, next(self._numbers))
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[key] = waiting
        request = membership_pb2.ProfileRequest(id=key[1], model=model)
        if self._sessions.find(member) is None:
            self.gone(member)
        self._sessions.send(member, CoordinatorMessage(profile=request))
        try:
            async with asyncio.timeout(self._timeout):
                return await waiting
        except TimeoutError:
            return Answer(member, None, DeadlineExceeded(f"no answer in {self._timeout:g} s"))
        finally:
            del self._open[key]


def unknown_model(model: str, answers: Iterable[Answer], names: dict[str, str]) -> NotFound:
    """No node has the model; says what each of them answered."""
    told = [f"{names.get(answer.member, answer.member)}: {answer.error}" for answer in answers]
    return NotFound(
        f"no node can serve the model {model[:256]!r} ({'; '.join(told[:_SHOWN])})",
        hint="put the model into the nodes' model folders, or name it as they do",
        reason="UNKNOWN_MODEL",
        param="model",
    )
