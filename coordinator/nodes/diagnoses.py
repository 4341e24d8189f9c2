"""Asks a node for a diagnosis of its machine, and measures the offset of its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sealring.coordinator.nodes.questions import Offset, Questions
from sealring.mesh.errors import Conflict, DeadlineExceeded, InvalidInput
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import DiagnosisAnswer, DiagnosisQuestion

MAX_REPORT_BYTES = 128 << 10
_ANSWER_SECONDS = 100.0
_MAX_TIME = 1 << 62


class Diagnoses:
    """One question to a node at a time. A node's report is passed on unread: its reader checks it."""

    def __init__(
        self,
        questions: Questions,
        *,
        timeout: float = _ANSWER_SECONDS,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._questions = questions
        self._timeout = timeout
        self._clock = clock
        self._asked: set[str] = set()

    async def ask(self, member: str) -> admin_pb2.DiagnoseNodeResponse:
        """A node's report on its machine.

        Raises Unavailable (MEMBER_OFFLINE), Conflict (DIAGNOSIS_BUSY), DeadlineExceeded (DIAGNOSIS_TIMEOUT),
        InvalidInput (BAD_REPORT), and the problem that the node reports.
        """
        if member in self._asked:
            raise Conflict(
                "the node is being examined already", hint="try again in a moment", reason="DIAGNOSIS_BUSY"
            )
        self._asked.add(member)
        try:
            sent = self._clock()
            async with asyncio.timeout(self._timeout):
                answer, received = await self._questions.ask_timed(
                    member, DiagnosisQuestion(), DiagnosisAnswer, self._clock
                )
        except TimeoutError:
            raise DeadlineExceeded(
                f"the node did not answer in {self._timeout:g} s",
                hint="run sealring doctor on it",
                reason="DIAGNOSIS_TIMEOUT",
            ) from None
        finally:
            self._asked.discard(member)
        if answer.HasField("problem"):
            raise from_problem(answer.problem)
        if len(answer.report) > MAX_REPORT_BYTES or not 0 < answer.asked <= answer.answered < _MAX_TIME:
            raise InvalidInput("the node's report is out of bounds", reason="BAD_REPORT")
        offset = Offset.of(sent, answer.asked, answer.answered, received)
        return admin_pb2.DiagnoseNodeResponse(
            report=answer.report, clock_offset=-offset.value, clock_error=offset.error
        )
