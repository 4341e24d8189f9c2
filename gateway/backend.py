"""Answers prompts with the rings that this gateway schedules."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from sealring.edge.access.quota import Quotas
from sealring.edge.inference.answer import Answer
from sealring.edge.inference.service import model_not_found
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.receipts import RecentRosters
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import MAX_ATTEMPTS
from sealring.gateway.usage.bound import most_tokens
from sealring.gateway.usage.store import Used
from sealring.mesh.errors import EpochEnded, InvalidInput, SealringError, Unavailable
from sealring.mesh.names import model_differs, served_name, split_pin
from sealring.mesh.prompt.images import VISION, has_images, without_images
from sealring.mesh.prompt.sealed import RequestInfo
from sealring.mesh.prompt.validate import MAX_TEXT_ENVELOPE_BYTES, check_text_envelope, validate_request
from sealring.mesh.ring.routing import SECRET_BYTES, routing_key
from sealring.mesh.rpc.holding import Holding
from sealring.v1 import inference_pb2 as inference

MAX_KEY = 256
MAX_RING = 64
MAX_HELD = 256 << 20
"""Bytes of the prompts of all requests under way. They are kept until the answers end: a ring may break, and
another one begin anew. No tenant has more of them than are left for the others."""

_RETRY_SECONDS = 5
START_SECONDS = 5.0
"""How long a request waits until a gateway that was just started has heard which models there are.

Policy: longer than it takes to connect to a coordinator that runs, and shorter than clients' time limits.
"""


class Router(Protocol):
    """The rings, as the backend uses them."""

    @property
    def complete(self) -> asyncio.Event:
        """Set once it is known which deployments there are."""

    def deployments(self) -> list[str]: ...

    def aliases(self) -> dict[str, str]: ...

    def models(self) -> list[inference.Model]: ...

    def loading(self, name: str) -> Unavailable | None: ...

    async def load(self, name: str, keep_alive: int | None, tenant: str) -> None: ...

    @property
    def rosters(self) -> RecentRosters:
        """Rosters for receipts that name them."""

    def signed_roster(self) -> inference.GetRosterResponse: ...

    def submit(self, request: Request, answer: Answer) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class RingBackend:
    """Answers prompts with the rings that this gateway schedules."""

    def __init__(
        self,
        rings: Router,
        metrics: Metrics,
        count: Callable[[str, str, Used], None] = lambda key_id, model, used: None,
        quotas: Quotas | None = None,
        start_seconds: float = START_SECONDS,
        most_held: int = MAX_HELD,
    ) -> None:
        """`count` gets what each request has used, with the id of its API key and its model, before its claim
        to the quota of that key ends."""
        self._rings = rings
        self._metrics = metrics
        self._count = count
        self._quotas = quotas or Quotas(lambda key_id: 0, lambda key_id: 0)
        self._start_seconds = start_seconds
        self._routing_secret = os.urandom(SECRET_BYTES)
        self._running: set[str] = set()
        self._held = Holding(most_held)
        self._idle = asyncio.Event()
        self._draining = False

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        if self._draining:
            raise _stopping()
        validate_request(request)
        model = await self._model(request.model)
        _check_sealed_for(request.envelope, model)
        self._check_sight(request.envelope, model)
        request_id = request.request_id or f"req-{secrets.token_hex(12)}"
        if request_id in self._running:
            raise InvalidInput(
                "the request id is in use",
                hint="use every request id once",
                reason="REQUEST_ID_IN_USE",
                param="request_id",
            )
        if request.HasField("receipt") and request.envelope.HasField("clear"):
            request.receipt.roster_hash = self._rings.rosters.newest
        answer = Answer(tell_prefill=request.tell_prefill)
        work = Request.of(
            request,
            request_id,
            key=key[:MAX_KEY],
            tenant=tenant,
            deployment=model,
            routing_key=self._routing_key(request, tenant),
        )
        work.progress.claimed = min(request.attempts, MAX_ATTEMPTS - 1)
        size = request.envelope.ByteSize()
        most, goes_on = lambda: most_tokens(request, self._named(model)), request.attempts > 0
        with self._quotas.claim(tenant, most, goes_on=goes_on) as claim:
            self._held.take(tenant, size)
            self._running.add(request_id)
            cut_off = 0
            try:
                with self._metrics.request(model) as observed:
                    self._rings.submit(work, answer)
                    async for event in answer:
                        observed.event(event, answer.timings.queued)
                        if event.finished.receipts:
                            self._rings.rosters.attach(event.finished.receipts)
                        yield event
            except SealringError as error:
                late = self._rings.loading(model) if error.reason == "DEADLINE_PASSED" else None
                if error.reason == EpochEnded.default_reason:  # its client asks again, and pays then
                    work.progress.prompt_tokens = work.progress.cached = 0
                    cut_off = sum(one.end is None for one in work.progress.choices)
                raise late or _counted(error, work) from error.__cause__
            finally:
                self._running.discard(request_id)
                self._held.give_back(tenant, size)
                if not self._running:
                    self._idle.set()
                self._rings.cancel(request_id)
                claim.rests = cut_off if work.progress.answered else claim.rests
                if work.progress.begun or work.progress.answered:
                    self._count(tenant, model, _used(work, answer))

    async def list_models(self) -> list[inference.Model]:
        models = self._rings.models()
        if self._draining:
            for model in models:
                model.rings, model.availability = 0, inference.MODEL_AVAILABILITY_UNSPECIFIED
        return models

    async def get_model(self, name: str) -> inference.Model:
        known = await self._model(name)
        return next(model for model in await self.list_models() if model.name == known)

    async def load_model(self, name: str, keep_alive: int | None, *, tenant: str = "") -> inference.Model:
        if self._draining:
            raise _stopping()
        known = await self._model(name)
        await self._rings.load(known, keep_alive, tenant)
        return await self.get_model(known)

    async def get_roster(self) -> inference.GetRosterResponse:
        """The roster, with all models once they are known: a client that seals looks for its model there."""
        await self._until_complete()
        return self._rings.signed_roster()

    async def drain(self, seconds: float) -> None:
        """Takes no more requests and gives the requests under way `seconds` to end."""
        self._draining = True
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    def _check_sight(self, envelope: inference.Envelope, model: str) -> None:
        """Leaves earlier images out for a model that cannot see, as far as its rings have said so.

        A ring that says so later does the same, or its head refuses. Raises InvalidInput (MODEL_CANNOT_SEE,
        ENVELOPE_TOO_LONG), FailedPrecondition (VISION_NOT_INSTALLED).
        """
        sealed, clear = envelope.sealed, envelope.clear
        if len(sealed) <= MAX_TEXT_ENVELOPE_BYTES and not has_images(clear):
            return
        models = self._rings.models()
        blind = next(
            (one for one in models if one.name == model and one.rings and VISION not in one.capabilities),
            None,
        )
        if blind is None:
            return
        seeing = [one.name for one in models if VISION in one.capabilities]
        if sealed:
            check_text_envelope(sealed)
        else:
            lacks = blind.vision_not_installed
            clear.CopyFrom(without_images(clear, model, seeing, not_installed=lacks))

    def _routing_key(self, request: inference.GenerateRequest, tenant: str) -> bytes:
        """The key that prefers a ring; empty for sealed prompts, which name their ring."""
        if request.envelope.WhichOneof("content") != "clear":
            return b""
        key = request.prompt_cache_key if request.HasField("prompt_cache_key") else None
        return routing_key(self._routing_secret, tenant, key, request.envelope.clear)

    async def _model(self, name: str) -> str:
        """The deployment that a name means. Raises NotFound (MODEL_NOT_FOUND), Unavailable (RING_DOWN),
        FailedPrecondition (MODEL_DIFFERS), InvalidInput (BAD_DIGEST)."""
        name, digest = split_pin(name)
        complete = self._rings.complete
        if (known := self._known(name)) is None:
            await self._until_complete()
            known = self._known(name)
        if known is not None:
            if digest and all((one.name, one.digest) != (known, digest) for one in self._rings.models()):
                raise model_differs(known)
            return known
        if not complete.is_set():
            raise Unavailable(
                "the gateway does not know yet which models there are",
                hint="try again later",
                reason="RING_DOWN",
                retry_after=_RETRY_SECONDS,
            )
        raise model_not_found(name, self._rings.deployments())

    async def _until_complete(self) -> None:
        """Waits for a while until it is known which models there are."""
        if not self._rings.complete.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._start_seconds):
                    await self._rings.complete.wait()

    def _named(self, name: str) -> inference.Model:
        return next((one for one in self._rings.models() if one.name == name), inference.Model())

    def _known(self, name: str) -> str | None:
        return served_name(name, self._rings.deployments(), self._rings.aliases())


def _used(request: Request, answer: Answer) -> Used:
    """The usage of a request that is over, answered to its end or not."""
    progress = request.progress
    milliseconds = round(answer.timings.ring * 1000)
    counts = int(progress.prompt_tokens > 0)  # 0 where the client asks again for the rest
    return Used(counts, progress.prompt_tokens, progress.cached, progress.answered, milliseconds)


def _stopping() -> Unavailable:
    return Unavailable(
        "the gateway is stopping",
        hint="ask another one, or try again later",
        reason="STOPPING",
        retry_after=_RETRY_SECONDS,
    )


def _counted(error: SealringError, request: Request) -> SealringError:
    """The error with the attempts in its metadata; a client that asks again claims them."""
    counted = copy.copy(error)  # a copy: other requests may fail with the same error
    attempts = request.progress.all_attempts
    counted.metadata = {**error.metadata, **({"attempts": str(attempts)} if attempts else {})}
    return counted


def _check_sealed_for(envelope: inference.Envelope, model: str) -> None:
    """Raises InvalidInput (BAD_REQUEST_INFO) unless a sealed prompt names its ring and a clear one does
    not."""
    to, sealed = envelope.sealed_for, envelope.WhichOneof("content") == "sealed"
    if sealed:
        RequestInfo(model, to.request_id, to.expires, to.roster_hash)
    if len(to.ring) > MAX_RING or bool(to.ring) != sealed:
        raise InvalidInput(
            "a sealed prompt must name its ring, and no other may",
            reason="BAD_REQUEST_INFO",
            param="envelope.sealed_for.ring",
        )
