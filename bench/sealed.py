"""The client library with a stopwatch: what sealing took, and where the gateway says the time went."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from sealring.client import AsyncClient, Completion, Delta
from sealring.client.asynchronous import AsyncReply
from sealring.client.attempt import Attempts
from sealring.client.core import ReplyState
from sealring.client.question import Question
from sealring.gateway.inference.timings import HEADER
from sealring.mesh.errors import SealringError
from sealring.mesh.rpc.status import from_rpc_error

_ENTRY = re.compile(r"([a-z_0-9]+);dur=([0-9.]+)")


@dataclass
class Measured:
    """One request. Times in seconds; `segments` by name, `error` the reason of a failure."""

    segments: dict[str, float] = field(default_factory=dict)
    error: str = ""
    completion: Completion | None = None

    def set_timing(self, header: str) -> None:
        self.segments |= {name: float(value) / 1e3 for name, value in _ENTRY.findall(header)}


class MeasuredClient(AsyncClient):
    """`AsyncClient` as it is, but that its only stream notes times; one request after the other."""

    def __init__(self, gateway: str, *, root_sha256: str, user: str) -> None:
        super().__init__(gateway, root_sha256=root_sha256, user=user)
        self.measured = Measured()

    async def measure(self, content: str, *, model: str, max_tokens: int, stream: bool) -> Measured:
        """Asks once. With `stream` the time to the first piece of text is noted as `ttft`."""
        measured = self.measured = Measured()
        begun = time.perf_counter()
        try:
            reply = self.chat([{"role": "user", "content": content}], model=model, max_tokens=max_tokens)
            if stream:
                async for _ in reply:
                    measured.segments.setdefault("ttft", time.perf_counter() - begun)
                measured.completion = reply.completion
            else:
                measured.completion = await reply
            measured.segments["total_e2e"] = time.perf_counter() - begun
        except SealringError as error:
            measured.error = error.reason
        return measured

    def _reply(self, question: Question) -> AsyncReply:
        state = ReplyState()
        return AsyncReply(state, self._timed(question, state, self.measured))

    async def _timed(
        self, question: Question, state: ReplyState, measured: Measured
    ) -> AsyncGenerator[Delta, None]:
        attempts = Attempts(question, on_ring=state.set_ring)
        while True:
            view = await self._view(fresh=attempts.retrying)
            begun = time.perf_counter()
            attempt = attempts.next(view.roster, view.loads)
            measured.segments["encrypt"] = time.perf_counter() - begun
            call = self._stub().Generate(
                attempt.request, timeout=attempts.seconds_left, metadata=self._metadata
            )
            try:
                async for event in call:
                    delta = attempt.take(event)
                    if delta is not None:
                        yield delta
                state.completion = attempt.completion()
                for key, value in await call.trailing_metadata():
                    if key == HEADER:
                        measured.set_timing(str(value))
                return
            except grpc.RpcError as error:
                pause = attempts.pause_after(from_rpc_error(error), attempt)
            finally:
                call.cancel()
                attempts.ended()
            await asyncio.sleep(pause)
