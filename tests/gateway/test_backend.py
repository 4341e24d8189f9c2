"""Requests as the backend gives them to the rings."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
from patience import until

from sealring.edge.access.quota import Quotas
from sealring.edge.inference.answer import Answer
from sealring.edge.metrics import Metrics
from sealring.gateway.backend import RingBackend
from sealring.gateway.scheduler import Request
from sealring.gateway.usage.store import Used
from sealring.mesh.errors import (
    DeadlineExceeded,
    EpochEnded,
    InvalidInput,
    ResourceExhausted,
    SealringError,
    Unavailable,
)
from sealring.mesh.prompt.images import NOTE
from sealring.v1 import inference_pb2 as inference

DIGEST = "ab" * 32


class OneRing:
    def __init__(self, *names: str) -> None:
        self.requests: list[Request] = []
        self.names = list(names) or ["model"]
        self.cancelled: list[str] = []
        self.complete = asyncio.Event()
        self.complete.set()
        self.absent = ""
        self.loads: list[tuple[str, int | None, str]] = []
        self.able: dict[str, list[str]] = {}
        self.lacking: set[str] = set()

    def deployments(self) -> list[str]:
        return self.names

    def aliases(self) -> dict[str, str]:
        return {"gpt-4o": self.names[0]}

    def loading(self, name: str) -> Unavailable | None:
        return Unavailable("it is being loaded", reason="MODEL_LOADING") if name == self.absent else None

    async def load(self, name: str, keep_alive: int | None, tenant: str) -> None:
        self.loads.append((name, keep_alive, tenant))

    def models(self) -> list[inference.Model]:
        return [
            inference.Model(
                name=name,
                rings=2,
                digest=DIGEST,
                capabilities=self.able.get(name, ()),
                vision_not_installed=name in self.lacking,
            )
            for name in self.names
        ]

    def signed_roster(self) -> inference.GetRosterResponse:
        return inference.GetRosterResponse()

    def submit(self, request: Request, answer: Answer) -> None:
        self.requests.append(request)
        raise Unavailable("enough", reason="RING_DOWN")

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class SlowRing(OneRing):
    """Takes requests, and answers them when the test does."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def submit(self, request: Request, answer: Answer) -> None:
        self.requests.append(request)
        self.answers.append(answer)


CLEAR = inference.Envelope(clear=inference.Prompt(text="x"))


async def ask(backend: RingBackend, **fields: Any) -> list[inference.GenerateResponse]:
    fields.setdefault("envelope", CLEAR)
    return [event async for event in backend.generate(inference.GenerateRequest(**fields), key="k" * 300)]


async def refused(backend: RingBackend, **fields: Any) -> SealringError:
    with pytest.raises(SealringError) as caught:
        await ask(backend, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("names", "asked", "told"),
    [
        (["a"], "", "RING_DOWN"),
        (["a"], "a", "RING_DOWN"),
        (["a", "b"], "b", "RING_DOWN"),
        (["a", "openai/b"], "openai/b", "RING_DOWN"),
        (["a", "b"], "", "MODEL_NOT_FOUND"),
        (["a"], "b", "MODEL_NOT_FOUND"),
    ],
)
async def test_a_model_is_asked_for_by_name_where_there_are_several(
    names: list[str], asked: str, told: str
) -> None:
    rings = OneRing(*names)
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    assert (await refused(backend, model=asked)).reason == told
    assert [one.deployment for one in rings.requests] == ([asked or "a"] if told == "RING_DOWN" else [])


async def test_what_is_told_of_models_that_are_not_there_is_short() -> None:
    rings = OneRing(*(f"model-{number}" for number in range(21)))
    error = await refused(RingBackend(rings, Metrics()), model="other")  # type: ignore[arg-type]
    assert "model-19" in str(error)
    assert "model-20" not in str(error)


async def test_no_model_is_unknown_before_all_are_known() -> None:
    rings = OneRing("model")
    rings.complete.clear()
    backend = RingBackend(rings, Metrics(), start_seconds=0.01)  # type: ignore[arg-type]
    error = await refused(backend, model="other")
    assert (error.reason, int(error.metadata["retry_after"]) > 0) == ("RING_DOWN", True)
    assert (await backend.get_model("model")).name == "model"
    with pytest.raises(SealringError) as caught:
        await backend.get_model("other")
    assert caught.value.reason == "RING_DOWN"


@pytest.mark.parametrize(("named", "reason"), [("other", "RING_DOWN"), ("none", "MODEL_NOT_FOUND")])
async def test_a_request_waits_until_a_gateway_that_was_just_started_knows_all(
    named: str, reason: str
) -> None:
    rings = OneRing("model")
    rings.complete.clear()
    backend = RingBackend(rings, Metrics(), start_seconds=200)  # type: ignore[arg-type]
    asking = asyncio.create_task(refused(backend, model=named))
    await asyncio.sleep(0)
    roster = asyncio.create_task(backend.get_roster())
    await asyncio.sleep(0)
    assert not rings.requests
    rings.names.append("other")
    assert not roster.done()
    rings.complete.set()
    assert (await roster) == inference.GetRosterResponse()
    assert (await asking).reason == reason
    assert [one.deployment for one in rings.requests] == ["other"] * (named == "other")


async def test_a_digest_behind_a_name_is_the_models_or_nobody_is_asked() -> None:
    rings = OneRing("a", "b")
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    for name in ("a", "gpt-4o"):
        assert (await refused(backend, model=f"{name}@{DIGEST}")).reason == "RING_DOWN"
        assert (await refused(backend, model=f"{name}@{'0' * 64}")).reason == "MODEL_DIFFERS"
        assert (await refused(backend, model=f"{name}@{DIGEST[1:]}")).reason == "BAD_DIGEST"
    assert [one.deployment for one in rings.requests] == ["a", "a"]


async def test_a_request_has_an_id_of_its_own_and_ends_with_it() -> None:
    rings = SlowRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    first = asyncio.create_task(ask(backend, request_id="r"))
    await until(lambda: rings.requests)
    error = await refused(backend, request_id="r")
    assert (error.reason, error.metadata["param"]) == ("REQUEST_ID_IN_USE", "request_id")
    rings.answers[0].started(inference.Started())
    rings.answers[0].finished(inference.Finished())
    assert len(await first) == 2
    assert rings.cancelled == ["r"]
    plain, again = (asyncio.create_task(ask(backend, **fields)) for fields in ({}, {"request_id": "r"}))
    await until(lambda: len(rings.requests) == 3)
    (request,) = [one for one in rings.requests[1:] if one.id != "r"]
    assert (len(request.id), request.choices, request.key, request.max_tokens) == (28, 1, "k" * 256, 0)
    assert request.id.startswith("req-")
    for task in (plain, again):
        task.cancel()
    await asyncio.gather(plain, again, return_exceptions=True)
    assert sorted(rings.cancelled) == sorted(["r", "r", request.id])


async def test_the_ring_is_told_what_was_asked_before() -> None:
    rings = OneRing("model")
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    for attempts, told in ((0, None), (2, "2"), (4_000_000_000, "7")):
        assert (await refused(backend, attempts=attempts)).metadata.get("attempts") == told
    assert [request.progress.claimed for request in rings.requests] == [0, 2, 7]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_has_used_what_a_ring_has_begun(begun: bool) -> None:
    """Also in a ring of another gateway, which tells its seconds at the end."""
    ring, counted = SlowRing(), list[tuple[str, str, Used]]()
    backend = RingBackend(ring, Metrics(), lambda *used: counted.append(used))
    asked = backend.generate(inference.GenerateRequest(envelope=CLEAR), tenant="laptop")
    answering = asyncio.create_task(anext(asked))
    await until(lambda: bool(ring.requests))
    progress = ring.requests[0].progress
    progress.prompt_tokens = 9
    if begun:
        progress.begin(4)
    answering.cancel()
    await asyncio.wait([answering])
    await asked.aclose()
    assert counted == ([("laptop", "model", Used(1, 9, 4))] if begun else [])


async def test_requests_at_once_share_a_quota_however_they_end() -> None:
    """Also such as nobody reads any more, and such as are refused before a ring takes them."""
    ring, spent = SlowRing(), Counter[str]()
    quotas = Quotas(lambda key: 2000, spent.__getitem__)

    def count(tenant: str, model: str, used: Used) -> None:
        spent[tenant] += used.computed

    backend = RingBackend(ring, Metrics(), count, quotas)

    def ask_once(tokens: int = 1000) -> asyncio.Task[Any]:
        asked = inference.GenerateRequest(envelope=CLEAR, max_tokens=tokens)
        return asyncio.create_task(_all_of(backend.generate(asked, tenant="laptop")))

    under_way = [ask_once(), ask_once()]
    await until(lambda: len(ring.requests) == 2)
    assert 3000 < quotas.claimed["laptop"] < 4000
    with pytest.raises(ResourceExhausted, match="under way may use what is left"):
        await ask_once(1)
    under_way.pop().cancel()
    third = ask_once()
    await until(lambda: len(ring.requests) == 3)
    ring.requests[0].progress.prompt_tokens = 990
    ring.requests[0].progress.begin(0)
    ring.answers[0].finished(inference.Finished())
    ring.answers[2].fail(Unavailable("gone", reason="RING_GONE"))
    with pytest.raises(Unavailable):
        await third
    await under_way.pop()
    assert (spent["laptop"], quotas.claimed) == (990, {})
    ring.submit = OneRing().submit  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await ask_once()
    assert not quotas.claimed


async def test_a_sealed_answer_that_is_cut_off_goes_on_whatever_is_left_of_the_quota() -> None:
    """Its tokens count once, and its prompt with the rest."""
    ring, spent = SlowRing(), Counter[str]()
    sealed_for = inference.SealedFor(ring="demo-0", request_id=b"r" * 16, expires=1, roster_hash=b"h" * 32)
    sealed = inference.Envelope(sealed=b"sealed", sealed_for=sealed_for)

    def count(tenant: str, model: str, used: Used) -> None:
        spent[tenant] += used.computed

    backend = RingBackend(ring, Metrics(), count, Quotas(lambda key: 20, spent.__getitem__))

    async def ask_once(attempts: int, tokens: int, error: SealringError | None = None) -> None:
        asked = inference.GenerateRequest(envelope=sealed, max_tokens=50, attempts=attempts)
        answering = asyncio.create_task(_all_of(backend.generate(asked, tenant="laptop")))
        number = len(ring.answers)
        await until(lambda: len(ring.answers) > number or answering.done())
        if not answering.done():
            progress = ring.requests[-1].progress
            progress.prompt_tokens, progress.begun = 7, tokens > 0
            progress.choices[0].tokens.extend([5] * tokens)
            ring.answers[-1].fail(error) if error else ring.answers[-1].finished(inference.Finished())
        await answering

    with pytest.raises(EpochEnded):
        await ask_once(0, 30, EpochEnded("gone"))
    assert spent["laptop"] == 30
    with pytest.raises(ResourceExhausted):
        await ask_once(0, 1)
    for error in (Unavailable("no ring", reason="RING_GONE"), Unavailable("no ring", reason="RING_GONE")):
        with pytest.raises(Unavailable):
            await ask_once(1, 0, error)
    with pytest.raises(EpochEnded):
        await ask_once(1, 4, EpochEnded("gone"))
    await ask_once(1, 6)
    assert spent["laptop"] == 30 + 4 + 6 + 7
    with pytest.raises(ResourceExhausted):
        await ask_once(1, 1)


async def _all_of(events: Any) -> list[inference.GenerateResponse]:
    return [event async for event in events]


async def test_a_gateway_that_stops_takes_nothing_more_and_waits_for_what_it_took() -> None:
    rings = SlowRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    assert [model.rings for model in await backend.list_models()] == [2]
    asked = asyncio.create_task(ask(backend))
    await until(lambda: rings.requests)
    draining = asyncio.create_task(backend.drain(200))
    await asyncio.sleep(0)
    stopping = await refused(backend)
    assert (stopping.reason, stopping.metadata["retry_after"]) == ("STOPPING", "5")
    assert [model.rings for model in await backend.list_models()] == [0]
    assert not draining.done()
    rings.answers[0].finished(inference.Finished())
    await asked
    await draining
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    asked = asyncio.create_task(ask(backend))
    await until(lambda: len(rings.requests) == 2)
    await backend.drain(0.001)
    assert not asked.done(), "it waits no longer than for its limit"
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("ring", "sealed", "reason"),
    [
        ("r" * 64, True, "RING_DOWN"),
        ("r" * 65, True, "BAD_REQUEST_INFO"),
        ("", True, "BAD_REQUEST_INFO"),
        ("r", False, "BAD_REQUEST_INFO"),
    ],
)
async def test_a_sealed_prompt_names_its_ring_and_no_other_does(ring: str, sealed: bool, reason: str) -> None:
    to = inference.SealedFor(ring=ring, request_id=bytes(16), expires=9, roster_hash=bytes(32))
    envelope = inference.Envelope(sealed_for=to)
    if sealed:
        envelope.sealed = b"x"
    else:
        envelope.clear.text = "x"
    error = await refused(RingBackend(OneRing(), Metrics()), envelope=envelope)  # type: ignore[arg-type]
    assert error.reason == reason


@pytest.mark.parametrize(
    ("logprobs", "asked", "given"),
    [
        (None, {}, {"logprobs": False, "choices": 1, "max_tokens": 0, "priority": 0, "patience": math.inf}),
        (0, {"choices": 3, "max_tokens": 7}, {"logprobs": True, "choices": 3, "max_tokens": 7}),
        (None, {"priority": -7, "deadline_ms": 1500}, {"priority": -7, "patience": 1.5}),
    ],
)
async def test_options_of_a_request_reach_the_scheduler(
    logprobs: int | None, asked: dict[str, Any], given: dict[str, Any]
) -> None:
    rings = OneRing()
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    if logprobs is not None:
        envelope.clear.sampling.logprobs = logprobs
    await refused(RingBackend(rings, Metrics()), envelope=envelope, **asked)  # type: ignore[arg-type]
    (request,) = rings.requests
    assert {name: getattr(request, name) for name in given} == given


LONG = "what all turns of a conversation begin with " * 8


async def routing_key_of(backend: RingBackend, rings: OneRing, tenant: str = "", **fields: Any) -> bytes:
    fields.setdefault("envelope", inference.Envelope(clear=inference.Prompt(text=LONG)))
    with pytest.raises(Unavailable):
        async for _ in backend.generate(inference.GenerateRequest(**fields), tenant=tenant):
            pass
    return rings.requests.pop().routing_key


async def test_what_a_ring_is_preferred_by() -> None:
    """The key that was given, else how the prompt begins; each tenant's apart; of a sealed prompt nothing."""
    rings = OneRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    derived = await routing_key_of(backend, rings)
    keyed = await routing_key_of(backend, rings, prompt_cache_key="k")
    other = inference.Envelope(clear=inference.Prompt(text="something else " * 40))
    assert len({derived, keyed, b""}) == 3
    assert await routing_key_of(backend, rings) == derived
    assert await routing_key_of(backend, rings, envelope=other) not in (derived, keyed, b"")
    assert await routing_key_of(backend, rings, envelope=other, prompt_cache_key="k") == keyed
    assert await routing_key_of(backend, rings, prompt_cache_key="") == b""
    assert await routing_key_of(backend, rings, "tenant") not in (derived, b"")
    assert await routing_key_of(backend, rings, "tenant", prompt_cache_key="k") not in (keyed, b"")
    to = inference.SealedFor(ring="r", request_id=bytes(16), expires=9, roster_hash=bytes(32))
    sealed = inference.Envelope(sealed=LONG.encode(), sealed_for=to)
    assert await routing_key_of(backend, rings, envelope=sealed) == b""
    again = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    assert await routing_key_of(again, rings) != derived


@pytest.mark.parametrize(
    ("key", "sealed"), [("x" * 257, False), ("x" * 10_240, False), ("\0" * 257, False), ("mine", True)]
)
async def test_a_key_that_is_too_long_or_beside_a_sealed_prompt_is_refused(key: str, sealed: bool) -> None:
    rings = OneRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    if sealed:
        to = inference.SealedFor(ring="r", request_id=bytes(16), expires=9, roster_hash=bytes(32))
        envelope = inference.Envelope(sealed=b"x", sealed_for=to)
    with pytest.raises(InvalidInput) as caught:
        async for _ in backend.generate(inference.GenerateRequest(envelope=envelope, prompt_cache_key=key)):
            pass
    told = caught.value
    assert (told.reason, told.metadata["param"]) == ("BAD_PROMPT_CACHE_KEY", "prompt_cache_key")
    assert key not in told.message
    assert rings.requests == []


@pytest.mark.parametrize("computed", [3.0, 0.0])
async def test_the_wait_for_the_first_step_is_counted_once_and_where_it_is_known(computed: float) -> None:
    """It is not known of a request that another gateway schedules."""
    metrics, rings = Metrics(), SlowRing()
    told = asyncio.create_task(ask(RingBackend(rings, metrics), model="model"))  # type: ignore[arg-type]
    await until(lambda: rings.answers)
    (answer,) = rings.answers
    answer.timings.routed, answer.timings.computed = 1.0, computed
    answer.started(inference.Started(prompt_tokens=7))
    for text in "ab":
        answer.delta(inference.Delta(text=text, tokens=1))
        await asyncio.sleep(0)
    answer.finished(inference.Finished())
    assert next(event.WhichOneof("event") for event in await told) == "started"
    names = ("prompt_tokens_total", "request_queue_time_seconds_count", "request_queue_time_seconds_sum")
    labels = {"model_name": "model"}
    found = [metrics.registry.get_sample_value(f"sealring_{name}", labels) or 0 for name in names]
    assert found == [7, *([1, 2.0] if computed else [0, 0])]


async def test_a_deadline_that_passes_while_a_model_is_loaded_says_so() -> None:
    rings = SlowRing()
    rings.absent = "model"
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    asking = asyncio.ensure_future(refused(backend, model="gpt-4o", keep_alive=60))
    await until(lambda: rings.answers)
    assert (rings.requests[0].deployment, rings.requests[0].keep_alive) == ("model", 60)
    rings.answers[0].fail(DeadlineExceeded("too late", reason="DEADLINE_PASSED"))
    assert (await asking).reason == "MODEL_LOADING"


async def test_models_are_loaded_by_their_names_and_aliases_until_the_gateway_stops() -> None:
    rings = OneRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    assert (await backend.load_model("gpt-4o", 0, tenant="me")).name == "model"
    assert rings.loads == [("model", 0, "me")]
    await backend.drain(0)
    with pytest.raises(Unavailable) as caught:
        await backend.load_model("model", None)
    assert caught.value.reason == "STOPPING"


def shown(*roles: str) -> inference.Envelope:
    """A chat with an image in each message of these roles but the assistant's."""
    image = [inference.Image(data=b"picture")]
    said = [inference.ChatMessage(role=role, images=image if role != "assistant" else []) for role in roles]
    return inference.Envelope(clear=inference.Prompt(chat=inference.Chat(messages=said)))


async def test_an_image_goes_to_a_model_that_sees_and_to_no_other() -> None:
    rings = OneRing("demo", "eyes")
    rings.able = {"demo": ["tools"], "eyes": ["vision"]}
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    blind = await refused(backend, model="demo", envelope=shown("user"))
    assert (blind.reason, blind.metadata["param"]) == ("MODEL_CANNOT_SEE", "messages[0].images[0]")
    assert "eyes" in blind.hint
    assert not rings.requests
    await refused(backend, model="eyes", envelope=shown("user"))
    assert rings.requests[0].shows


async def test_an_image_for_a_model_whose_head_lacks_what_reads_it_is_refused_with_the_command() -> None:
    rings = OneRing("demo")
    rings.lacking = {"demo"}
    blind = await refused(RingBackend(rings, Metrics()), model="demo", envelope=shown("user"))  # type: ignore[arg-type]
    assert blind.reason == "VISION_NOT_INSTALLED"
    assert "pipx inject sealring mlx-vlm" in blind.hint


async def test_a_model_that_cannot_see_reads_notes_of_earlier_images() -> None:
    rings = OneRing("demo")
    await refused(RingBackend(rings, Metrics()), envelope=shown("user", "assistant", "tool"))  # type: ignore[arg-type]
    assert not rings.requests[0].shows
    first, _, last = rings.requests[0].envelope.clear.chat.messages
    assert first.content == last.content == NOTE


async def test_a_long_sealed_prompt_goes_only_to_a_model_that_may_see() -> None:
    sealed_for = inference.SealedFor(ring="r", request_id=bytes(16), expires=1 << 40, roster_hash=bytes(32))
    long = inference.Envelope(sealed=bytes((8 << 20) + 1), sealed_for=sealed_for)
    rings = OneRing("demo", "eyes")
    rings.able = {"eyes": ["vision"]}
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    assert (await refused(backend, model="demo", envelope=long)).reason == "ENVELOPE_TOO_LONG"
    assert (await refused(backend, model="eyes", envelope=long)).reason == "RING_DOWN"


async def test_one_tenants_prompts_leave_room_for_anothers() -> None:
    rings = SlowRing()
    envelope = inference.Envelope(clear=inference.Prompt(text="x" * 100))
    backend = RingBackend(rings, Metrics(), most_held=2 * envelope.ByteSize())  # type: ignore[arg-type]
    made = inference.GenerateRequest(envelope=envelope)
    first = asyncio.create_task(anext(backend.generate(made, tenant="a")))
    await until(lambda: len(rings.requests) == 1)
    with pytest.raises(SealringError) as caught:
        await anext(backend.generate(made, tenant="a"))
    assert caught.value.reason == "TOO_MANY_BYTES"
    small = inference.GenerateRequest(envelope=inference.Envelope(clear=inference.Prompt(text="x" * 9)))
    other = asyncio.create_task(anext(backend.generate(small, tenant="b")))
    await until(lambda: len(rings.requests) == 2)
    for task in (first, other):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    again = asyncio.create_task(anext(backend.generate(made, tenant="a")))
    await until(lambda: len(rings.requests) == 3)
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
