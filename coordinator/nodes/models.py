"""Has nodes fetch and remove models, and bounds what they report of the models that they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sealring.coordinator.nodes.questions import Questions
from sealring.mesh.errors import DeadlineExceeded, InvalidInput
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import membership_pb2

_ANSWER_SECONDS = 60.0
_MAX_HELD = 64
_MAX_NAME = 256
_MAX_PROBLEM = 1000
_MAX_BYTES = 1 << 50


class Models:
    """Orders to nodes about models. `timeout` is in seconds."""

    def __init__(self, questions: Questions, *, timeout: float = _ANSWER_SECONDS) -> None:
        self._questions = questions
        self._timeout = timeout

    async def change(self, member: str, model: str, *, remove: bool, to_plan: bool = False) -> None:
        """Has a node remove a model, or begin to fetch it, or `to_plan` all of it but the weights.

        Raises InvalidInput (BAD_MODEL_NAME), Unavailable (MEMBER_OFFLINE), DeadlineExceeded (MODEL_TIMEOUT),
        and the problem that the node reports.
        """
        if not 1 <= len(model) <= _MAX_NAME or not model.isprintable():
            raise InvalidInput("a model's name is empty or too long", reason="BAD_MODEL_NAME", param="model")
        question = membership_pb2.ChangeModel(model=model, remove=remove, to_plan=to_plan)
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._questions.ask(member, question, membership_pb2.ModelChanged)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the node did not answer in {self._timeout:g} s", hint="try again", reason="MODEL_TIMEOUT"
            ) from None
        if answer.HasField("problem"):
            raise from_problem(answer.problem)


def check_held(models: Sequence[membership_pb2.HeldModel]) -> None:
    """Bounds a node's report of its models. Raises InvalidInput (BAD_HEARTBEAT)."""
    if len(models) > _MAX_HELD or any(
        len(one.name) > _MAX_NAME
        or len(one.problem) > _MAX_PROBLEM
        or not (one.name + one.problem).isprintable()
        or max(one.size, one.done, one.rate, one.seconds_left) > _MAX_BYTES
        for one in models
    ):
        raise InvalidInput("a heartbeat is out of bounds", reason="BAD_HEARTBEAT")
