"""The client library over asyncio."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import grpc
import grpc.aio

from sealring.client.attempt import GONE, Attempts
from sealring.client.choice import RingLoads
from sealring.client.core import (
    CALL_SECONDS,
    Asks,
    Gateways,
    Newest,
    View,
    metadata_of,
    models_of,
    rings_of,
    roster_failure,
)
from sealring.client.question import Question, routing_key_of
from sealring.client.trust import RosterVerifier, own_root_sha256, parse_root_sha256
from sealring.client.types import Completion, Delta, Model, RequestOptions, Ring, Trust
from sealring.mesh.clock import monotonic_clock
from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError, Unavailable
from sealring.mesh.names import split_pin
from sealring.mesh.prompt.numbers import request_of, validate_numbers
from sealring.mesh.prompt.options import is_card
from sealring.mesh.ring.routing import SECRET_BYTES
from sealring.mesh.rpc.server import CHANNEL_OPTIONS
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.transport import transport
from sealring.mesh.system.addresses import parse_address, require_loopback
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc
from sealring.v1.model_pb2 import ModelCard

OWN_GATEWAY = "127.0.0.1:7780"
"""The usual address of a gateway on this machine."""


class ReplyState:
    """The progress of one answer: its stream writes, its reply object reads."""

    def __init__(self) -> None:
        self.ring: Ring | None = None
        self.completion: Completion | None = None
        self.prompt_tokens = 0
        self.load_seconds = 0.0
        self.own = ModelCard()
        self.hear: Callable[[inference.Prefilling], None] = lambda told: None

    def set_ring(self, ring: Ring) -> None:
        self.ring = ring


class AsyncReply:
    """One answer: iterate it for its pieces, or await it for the whole. Nothing is sent before either.

    Leaving the iteration ends the request everywhere; `aclose` or `async with` does so at once.
    """

    def __init__(self, state: ReplyState, deltas: AsyncGenerator[Delta, None]) -> None:
        self._state = state
        self._deltas = deltas

    @property
    def ring(self) -> Ring | None:
        """The ring that sees the prompt; None before the first piece of the answer."""
        return self._state.ring

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt, by the word of the head; 0 before the first piece of the answer."""
        return self._state.prompt_tokens

    @property
    def load_seconds(self) -> float:
        """Seconds for which the question has waited until its model was loaded."""
        return self._state.load_seconds

    @property
    def own(self) -> ModelCard:
        """Options of sampling that the model has of its own, by the word of the gateway."""
        return self._state.own

    def on_prefill(self, hear: Callable[[inference.Prefilling], None]) -> None:
        """Has `hear` called every few seconds while a long prompt is computed."""
        self._state.hear = hear

    @property
    def completion(self) -> Completion:
        """The whole answer with usage and finish reason. Raises FailedPrecondition (NOT_FINISHED)."""
        if self._state.completion is None:
            raise FailedPrecondition("the answer has not ended", reason="NOT_FINISHED")
        return self._state.completion

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


class Channels(Protocol):
    """Connections to gateways, whose owner they stay."""

    def get(self, gateway: str) -> grpc.aio.Channel:
        """The connection to the gateway at this address (host:port), for one call."""

    async def close(self) -> None:
        """Closes them."""


class Opened:
    """Connections that are opened once."""

    def __init__(self, credentials: grpc.ChannelCredentials | None) -> None:
        self._credentials = credentials
        self._opened: dict[str, grpc.aio.Channel] = {}

    def get(self, gateway: str) -> grpc.aio.Channel:
        if gateway not in self._opened:
            if self._credentials is None:
                channel = transport.get().channel(gateway, CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(gateway, self._credentials, options=CHANNEL_OPTIONS)
            self._opened[gateway] = channel
        return self._opened[gateway]

    async def close(self) -> None:
        opened, self._opened = self._opened, {}
        for channel in opened.values():
            await channel.close()


class AsyncClient(Asks[AsyncReply]):
    """Asks the rings behind a gateway that sees neither prompts nor answers. For one event loop.

    Use it as `async with AsyncClient("127.0.0.1:7780", root_sha256="...") as client`.
    """

    def __init__(
        self,
        gateway: str | Sequence[str] = OWN_GATEWAY,
        *,
        root_sha256: str | bytes | None = None,
        min_trust: int | str = 0,
        state_file: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        user: str = "",
        channels: Channels | None = None,
    ) -> None:
        """A client of the gateway at `gateway` (host:port of its gRPC edge), or of several gateways of one
        cluster: when one is gone, answers go on over the next. Nothing is sent yet.

        `root_sha256` pins the cluster: the hash of its root key, 64 hexadecimal digits, learned from the
        operator and not from the gateway; None: that of the cluster which this machine is in. `min_trust` (a
        level as `software`, or its score) is a floor under what each call demands. `state_file` remembers the
        newest roster over restarts. `timeout` in seconds, at most 3600, holds for calls that set none; the
        envelope expires with it. Without `credentials` the connection to the gateway is not encrypted again,
        which costs a sealed prompt nothing but metadata. `api_key` is for gateways that ask for one; without
        `credentials` it is sent over loopback only. Gateways that ask for no key get `user` instead: requests
        of different users take turns. `channels` are used instead of connections with `credentials`.

        Raises InvalidInput (BAD_ADDRESS, BAD_ROOT_HASH, BAD_MIN_TRUST, BAD_USER), ConfigError
        (LOOPBACK_ONLY, NO_ROOT_HASH), AttestationError (UNKNOWN_TRUST_LEVEL).
        """
        addresses = [gateway] if isinstance(gateway, str) else list(gateway)
        if not addresses:
            raise InvalidInput("no gateway is named", hint="give host:port of one", reason="BAD_ADDRESS")
        self.gateways = Gateways(addresses)
        for address in self.gateways.addresses:
            parse_address(address)
            if api_key is not None and credentials is None:
                require_loopback(address)
        self._metadata = metadata_of(api_key, user)
        self._floor = int(Trust(min_trust))
        validate_numbers(min_trust=self._floor)
        self._channels: Channels = channels or Opened(credentials)
        self._prefix_salt = secrets.token_bytes(32)
        self._routing_secret = secrets.token_bytes(SECRET_BYTES)
        self._timeout = timeout
        path = Path(state_file) if state_file is not None else None
        pin = own_root_sha256() if root_sha256 is None else parse_root_sha256(root_sha256)
        self._verifier = RosterVerifier(pin, path)
        self._newest = Newest()
        self._fetching = asyncio.Lock()

    def ask(self, prompt: inference.Prompt, **options: Unpack[RequestOptions]) -> AsyncReply:
        """Asks with a prompt of the contract as it is; otherwise as `chat`."""
        model, timeout = options.pop("model", ""), options.pop("timeout", None)
        nonce = options.pop("receipt_nonce", b"") or secrets.token_bytes(32)
        key = routing_key_of(self._routing_secret, options.pop("prompt_cache_key", None), prompt)
        request = request_of(options)
        request.model, request.min_trust = model, max(self._floor, request.min_trust)
        seconds = self._timeout if timeout is None else timeout
        return self._reply(Question(prompt, request, seconds, self._prefix_salt, key, nonce))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is under way and closes the connections."""
        await self._channels.close()

    async def models(self) -> list[Model]:
        """The models of the verified roster, by name. Raises RosterError, Unavailable."""
        return models_of(await self._view())

    async def load(self, model: str, *, keep_alive: int | None = None, within: float | None = None) -> None:
        """Has a model on demand loaded and waits until it serves, `within` seconds at most (None: the
        client's); with `keep_alive` 0 it is unloaded.

        Raises NotFound (MODEL_NOT_FOUND), Unavailable (MODEL_LOADING, and why it cannot be loaded).
        """
        seconds = self._timeout if within is None else within
        asked = inference.LoadModelRequest(model=model, keep_alive=keep_alive)
        gateway = self.gateways.current
        try:
            await self._stub(gateway).LoadModel(asked, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            failed = self._failed(error, gateway)
            if failed.code == "DEADLINE_EXCEEDED":
                failed = Unavailable(
                    f"{model} was not loaded within {seconds:g} s",
                    hint="try again later, or with a later deadline",
                    reason="MODEL_LOADING",
                )
            raise failed from None

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
        return inference_grpc.InferenceStub(self._channels.get(gateway))

    async def _view(self, *, fresh: bool = False) -> View:
        """The verified roster with the hints of the first gateway that has one."""
        async with self._fetching:
            recent = None if fresh else self._newest.recent()
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
        attempts = Attempts(question, met=self._newest.known, on_ring=state.set_ring)
        while True:
            try:
                view = await self._view(fresh=attempts.retrying)
                model = view.deployment(split_pin(question.request.model)[0])
                if view.absent(model):
                    asked = question.request
                    seconds = min(asked.deadline_ms / 1e3 or math.inf, attempts.seconds_left)
                    keep_alive = asked.keep_alive if asked.HasField("keep_alive") else None
                    begun = monotonic_clock()
                    attempts.loading()
                    await self.load(model, keep_alive=keep_alive, within=seconds)
                    state.load_seconds += monotonic_clock() - begun
                    view = await self._view(fresh=True)
                    if view.absent(model):
                        raise _unloaded(model)
            except SealringError as error:
                await asyncio.sleep(attempts.pause_after(error))
                continue
            attempt, gateway = (
                attempts.next(view.roster, view.loads, model, view.response),
                self.gateways.current,
            )
            call = self._stub(gateway).Generate(
                attempt.request, timeout=attempts.seconds_left, metadata=self._metadata
            )
            try:
                async for event in call:
                    delta = attempt.take(event)
                    state.prompt_tokens = state.prompt_tokens or attempt.prompt_tokens
                    if event.HasField("prefilling"):
                        state.hear(event.prefilling)
                    if event.HasField("started"):
                        state.load_seconds += event.started.load_ms / 1000
                        state.own = event.started.own if is_card(event.started.own) else ModelCard()
                    if delta is not None:
                        yield delta
                state.completion = attempt.completion()
                if state.completion is not None:
                    return
                pause = 0.0
            except grpc.RpcError as error:
                failed = self._failed(error, gateway)
                if attempt.complete:  # nothing is left to ask for but receipts, of an epoch that is over
                    state.completion = attempt.completion()
                    return
                pause = attempts.pause_after(failed, attempt)
            finally:
                call.cancel()
                attempts.ended()
            await asyncio.sleep(pause)

    def _failed(self, error: grpc.RpcError, gateway: str) -> SealringError:
        """The error of a failed call. If the gateway can answer no call, the client moves on to the next."""
        failed = from_rpc_error(error)
        if failed.reason in GONE:
            self.gateways.lost(gateway)
        return failed

    def _verify(self, response: inference.GetRosterResponse) -> View:
        view = View(self._verifier.verify(response), response, RingLoads(response.serving))
        self._newest.set(view)
        return view


def _unloaded(model: str) -> Unavailable:
    """The error of a model that was loaded, and gone from the roster when that was fetched."""
    return Unavailable(f"{model} was unloaded at once", hint="try again", reason="RING_GONE", retry_after=1)
