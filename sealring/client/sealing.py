"""The inference interface over a client that seals: what comes in clear leaves sealed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable

from sealring.client.asynchronous import AsyncClient, AsyncReply
from sealring.client.types import Completion, Delta, Model
from sealring.edge.inference.service import model_not_found
from sealring.edge.metrics import Metrics
from sealring.mesh.clock import system_clock
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.mesh.names import served_name
from sealring.mesh.prompt.numbers import numbers_of
from sealring.v1 import inference_pb2 as inference

_MAX_MS = (1 << 32) - 1
_REASONS = {"stop": inference.FINISH_REASON_STOP, "length": inference.FINISH_REASON_LENGTH}


class SealingBackend:
    """Answers prompts (edge.inference.service.InferenceBackend) through a client that seals them."""

    def __init__(self, client: AsyncClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._created = int(system_clock())

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """Prefilling where it is wanted, Started, deltas, Finished. `key`, `tenant` and cache key stay here.

        Raises what `AsyncClient.chat` lists.
        """
        if request.envelope.WhichOneof("content") != "clear":
            raise InvalidInput("the prompt is sealed already", reason="SEALED_ALREADY", param="envelope")
        label = await self._label(request.model)
        reply = self._client.ask(
            request.envelope.clear,
            model=request.model,
            prompt_cache_key=request.prompt_cache_key if request.HasField("prompt_cache_key") else None,
            receipt_nonce=request.receipt.nonce,
            **numbers_of(request),
        )
        begun = False
        async with contextlib.aclosing(reply), contextlib.aclosing(_with_prefill(reply)) as pieces:
            with self._metrics.request(label) as observed:
                async for delta in pieces:
                    if isinstance(delta, inference.Prefilling):
                        if request.tell_prefill:
                            yield inference.GenerateResponse(prefilling=delta)
                        continue
                    if not begun:
                        begun = True
                        yield _started(request, reply)
                    event = inference.GenerateResponse(delta=_delta(delta))
                    observed.event(event)
                    yield event
                if not begun:
                    yield _started(request, reply)
                counted, finished = _ended(reply.completion)
                if request.HasField("receipt"):
                    finished.finished.receipts.extend(reply.completion.receipts)
                observed.event(counted)
                observed.event(finished)
                yield finished

    async def _label(self, name: str) -> str:
        """A model's name for the metrics: whatever a caller makes up is one and the same, and whatever is
        asked while no gateway is there, for which the question itself waits."""
        try:
            models = await self._client.models()
        except Unavailable:
            return "other"
        name = name.partition("@")[0]
        return served_name(name, [model.name for model in models], aliases_of(models)) or "other"

    async def list_models(self) -> list[inference.Model]:
        """The models of the verified roster."""
        return [
            inference.Model(
                name=model.name,
                model_type=model.model_type,
                context=model.context,
                min_trust=model.min_trust,
                rings=model.rings,
                rows=model.rows,
                created=self._created,
                capabilities=model.capabilities,
                availability=inference.ModelAvailability.ValueType(model.availability),
                aliases=model.aliases,
                expires=model.expires,
                memory=model.memory,
                reason=model.reason,
                digest=model.digest,
                progress=model.progress,
                card=model.card,
            )
            for model in await self._client.models()
        ]

    async def get_model(self, name: str) -> inference.Model:
        """One of these. Raises NotFound (MODEL_NOT_FOUND)."""
        models = await self.list_models()
        known = served_name(name, [model.name for model in models], aliases_of(models))
        for model in models:
            if model.name == known:
                return model
        raise model_not_found(name, [model.name for model in models])

    async def load_model(self, name: str, keep_alive: int | None, *, tenant: str = "") -> inference.Model:
        """Has the gateway load or unload a model. Raises NotFound (MODEL_NOT_FOUND), Unavailable."""
        model = await self.get_model(name)
        loaded = model.availability == inference.MODEL_AVAILABILITY_LOADED
        if not loaded or model.expires or keep_alive is not None:  # else nothing would change
            await self._client.load(model.name, keep_alive=keep_alive)
        return model

    async def get_roster(self) -> inference.GetRosterResponse:
        """The roster that was verified."""
        return await self._client.signed_roster()


async def _with_prefill(reply: AsyncReply) -> AsyncGenerator[Delta | inference.Prefilling, None]:
    """The pieces of an answer, and before the first how far its prompt is."""
    heard = asyncio.Queue[inference.Prefilling | None]()
    reply.on_prefill(heard.put_nowait)
    pieces = aiter(reply)
    first = asyncio.ensure_future(anext(pieces, None))
    first.add_done_callback(lambda _: heard.put_nowait(None))
    try:
        while (told := await heard.get()) is not None:
            yield told
        if (piece := await first) is not None:
            yield piece
    finally:
        first.cancel()
        await asyncio.wait((first,))
    async for piece in pieces:
        yield piece


def aliases_of(models: Iterable[Model | inference.Model]) -> dict[str, str]:
    """Further names of models, each with the model's own."""
    return {alias: model.name for model in models for alias in model.aliases}


def _started(request: inference.GenerateRequest, reply: AsyncReply) -> inference.GenerateResponse:
    ring = reply.ring
    assert ring is not None
    return inference.GenerateResponse(
        started=inference.Started(
            request_id=request.request_id,
            model=ring.deployment,
            ring=ring.id,
            prompt_tokens=reply.prompt_tokens,
            min_trust=ring.min_trust,
            roster_version=ring.roster_version,
            load_ms=min(round(reply.load_seconds * 1000), _MAX_MS),
            own=reply.own,
        )
    )


def _delta(delta: Delta) -> inference.Delta:
    told = inference.Delta(text=delta.text, tokens=delta.tokens, choice=delta.choice)
    for one in delta.logprobs:
        token = told.logprobs.add(id=one.id, spelling=one.spelling, logprob=one.logprob, prompt=one.prompt)
        for each in one.top:
            token.top.add(id=each.id, spelling=each.spelling, logprob=each.logprob)
    if delta.reasoning or delta.tool_calls or delta.stop or delta.vector:
        told.parsed.reasoning, told.parsed.stop = delta.reasoning, delta.stop
        told.parsed.vector.extend(delta.vector)
        for call in delta.tool_calls:
            told.parsed.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    return told


def _ended(completion: Completion) -> tuple[inference.GenerateResponse, inference.GenerateResponse]:
    """The prompt's length, which only the end tells for sure, and the end."""
    usage = completion.usage
    finished = inference.Finished(
        reason=_REASONS[completion.finish_reason],
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        choices=[
            inference.FinishedChoice(
                reason=_REASONS[choice.finish_reason], completion_tokens=choice.completion_tokens
            )
            for choice in completion.choices
            if len(completion.choices) > 1
        ],
    )
    return (
        inference.GenerateResponse(started=inference.Started(prompt_tokens=usage.prompt_tokens)),
        inference.GenerateResponse(finished=finished),
    )
