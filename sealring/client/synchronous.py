"""The client library without asyncio: the same calls, which block."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

import grpc

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


class Reply(ReplyView):
    """One answer: iterate it for its pieces, or take its `result`. Nothing is sent before either.

    Leaving the iteration ends the request everywhere; `close` or `with` does so at once.
    """

    def __init__(self, state: ReplyState, deltas: Generator[Delta, None, None]) -> None:
        super().__init__(state)
        self._deltas = deltas

    def __iter__(self) -> Generator[Delta, None, None]:
        return self._deltas

    def result(self) -> Completion:
        """Reads the answer to its end. Raises what `Client.chat` lists."""
        for _ in self._deltas:
            pass
        return self.completion

    def close(self) -> None:
        """Ends the request if it is still under way."""
        self._deltas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(ClientCore[Reply]):
    """Asks the rings behind a gateway that sees neither prompts nor answers. Several threads may share it.

    Use it as `with Client("127.0.0.1:7780", root_sha256="...") as client`.
    """

    def _set_up(self) -> None:
        self._opened: dict[str, grpc.Channel] = {}
        self._fetching = threading.Lock()
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is under way and closes the connections."""
        with self._opening:
            opened, self._opened = self._opened, {}
        for channel in opened.values():
            channel.close()

    def models(self) -> list[Model]:
        """The models of the verified roster, by name. Raises RosterError, Unavailable."""
        return models_of(self._view())

    def rings(self) -> list[Ring]:
        """The rings of the verified roster with all of their members. Raises RosterError, Unavailable."""
        return rings_of(self._view().roster)

    def signed_roster(self) -> inference.GetRosterResponse:
        """The roster as it was signed, after its verification. Raises RosterError, Unavailable."""
        return self._view().response

    def _reply(self, question: Question) -> Reply:
        state = ReplyState()
        return Reply(state, self._stream(question, state))

    def _stub(self, gateway: str) -> Any:
        with self._opening:
            if gateway not in self._opened:
                if self._credentials is None:
                    channel = grpc.insecure_channel(gateway, options=CHANNEL_OPTIONS)
                else:
                    channel = grpc.secure_channel(gateway, self._credentials, options=CHANNEL_OPTIONS)
                self._opened[gateway] = channel
            return inference_grpc.InferenceStub(self._opened[gateway])

    def _view(self, *, fresh: bool = False) -> View:
        """The verified roster with the hints of the first gateway that has one."""
        with self._fetching:
            recent = None if fresh else self._recent()
            if recent is not None:
                return recent
            for gateway in self.gateways.in_turn():
                try:
                    response = self._stub(gateway).GetRoster(
                        inference.GetRosterRequest(), timeout=CALL_SECONDS, metadata=self._metadata
                    )
                    view = self._verify(response)
                    self.gateways.current = gateway
                    return view
                except grpc.RpcError as error:
                    failed = roster_failure(error)
                except SealringError as error:
                    failed = error
            raise failed

    def _stream(self, question: Question, state: ReplyState) -> Generator[Delta, None, None]:
        attempts = Attempts(question, met=self._fetched is not None, on_ring=state.set_ring)
        while True:
            try:
                view = self._view(fresh=attempts.retrying)
            except SealringError as error:
                time.sleep(attempts.pause_after(error))
                continue
            attempt, gateway = attempts.next(view.roster, view.loads), self.gateways.current
            call = self._stub(gateway).Generate(
                attempt.request, timeout=attempts.seconds_left, metadata=self._metadata
            )
            try:
                for event in call:
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
            time.sleep(pause)
