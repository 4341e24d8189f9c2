"""The client library over asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from sealring.client.attempt import Attempts
from sealring.client.core import (
    CALL_SECONDS,
    ClientCore,
    ReplyState,
    ReplyView,
    View,
    models_of,
    rings_of,
    roster_failure,
)
from sealring.client.question import Question
from sealring.client.types import Completion, Delta, Model, Ring
from sealring.mesh.errors import SealringError
from sealring.mesh.rpc.server import CHANNEL_OPTIONS
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc


class AsyncReply(ReplyView):
    """One answer: iterate it for its pieces, or await it for the whole. Nothing is sent before either.

    Leaving the iteration ends the request everywhere; `aclose` or `async with` does so at once.
    """

    def __init__(self, state: ReplyState, deltas: AsyncGenerator[Delta, None]) -> None:
        super().__init__(state)
        self._deltas = deltas

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return self._deltas

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.result().__await__()

    async def result(self) -> Completion:
        """Reads the answer to its end. Raises what `AsyncClient.chat` lists."""
        async for _ in self._deltas:
            pass
        return self.completion

    async def aclose(self) -> None:
        """Ends the request if it is still under way."""
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient(ClientCore[AsyncReply]):
    """Asks the rings behind a gateway that sees neither prompts nor answers. For one event loop.

    Use it as `async with AsyncClient("127.0.0.1:7780", root_sha256="...") as client`.
    """

    def _set_up(self) -> None:
        self._opened: dict[str, grpc.aio.Channel] = {}
        self._fetching = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is under way and closes the connections."""
        opened, self._opened = self._opened, {}
        for channel in opened.values():
            await channel.close()

    async def models(self) -> list[Model]:
        """The models of the verified roster, by name. Raises RosterError, Unavailable."""
        return models_of(await self._view())

    async def rings(self) -> list[Ring]:
        """The rings of the verified roster with all of their members. Raises RosterError, Unavailable."""
        return rings_of((await self._view()).roster)

    async def signed_roster(self) -> inference.GetRosterResponse:
        """The roster as it was signed, after its verification. Raises RosterError, Unavailable."""
        return (await self._view()).response

    def _reply(self, question: Question) -> AsyncReply:
        state = ReplyState()
        return AsyncReply(state, self._stream(question, state))

    def _stub(self, gateway: str) -> Any:
        if gateway not in self._opened:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(gateway, options=CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(gateway, self._credentials, options=CHANNEL_OPTIONS)
            self._opened[gateway] = channel
        return inference_grpc.InferenceStub(self._opened[gateway])

    async def _view(self, *, fresh: bool = False) -> View:
        """The verified roster with the hints of the first gateway that has one."""
        async with self._fetching:
            recent = None if fresh else self._recent()
            if recent is not None:
                return recent
            for gateway in self.gateways.in_turn():
                try:
                    response = await self._stub(gateway).GetRoster(
                        inference.GetRosterRequest(), timeout=CALL_SECONDS, metadata=self._metadata
                    )
                    view = await asyncio.to_thread(self._verify, response)
                    self.gateways.current = gateway
                    return view
                except grpc.RpcError as error:
                    failed = roster_failure(error)
                except SealringError as error:
                    failed = error
            raise failed

    async def _stream(self, question: Question, state: ReplyState) -> AsyncGenerator[Delta, None]:
        attempts = Attempts(question, met=self._fetched is not None, on_ring=state.set_ring)
        while True:
            try:
                view = await self._view(fresh=attempts.retrying)
            except SealringError as error:
                await asyncio.sleep(attempts.pause_after(error))
                continue
            attempt, gateway = attempts.next(view.roster, view.loads), self.gateways.current
            call = self._stub(gateway).Generate(
                attempt.request, timeout=attempts.seconds_left, metadata=self._metadata
            )
            try:
                async for event in call:
                    delta = attempt.take(event)
                    if delta is not None:
                        yield delta
                state.completion = attempt.completion()
                if state.completion is not None:
                    return
                pause = 0.0
            except grpc.RpcError as error:
                pause = attempts.pause_after(self._failed(error, gateway), attempt)
            finally:
                call.cancel()
                attempts.ended()
            await asyncio.sleep(pause)
