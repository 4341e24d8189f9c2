import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sealring.client import AsyncClient
from sealring.client import attempt as attempt_module
from sealring.client.core import Gateways
from sealring.client.types import Usage
from sealring.mesh.errors import (
    DeadlineExceeded,
    EnvelopeError,
    EpochEnded,
    FailedPrecondition,
    InvalidInput,
    NotFound,
    PermissionDenied,
    RosterError,
    SealringError,
    Unavailable,
)
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import PaperCluster, ScriptedGateway
from sealring.testing.gateway import PIECES
from sealring.v1 import inference_pb2 as inference

QUESTION = [{"role": "user", "content": "what is the capital?"}]
Events = list[inference.GenerateResponse]


def changed(change: Callable[[Events], Events]) -> Any:
    """A script that is honest but for `change`."""

    async def script(
        gateway: ScriptedGateway, request: inference.GenerateRequest
    ) -> AsyncIterator[inference.GenerateResponse]:
        for response in change(gateway.reply(request)):
            yield response

    return script


def failing(*errors: SealringError, after: int = 0) -> Any:
    """A script that fails with each error once, after `after` events, and is honest then."""
    left = list(errors)

    async def script(
        gateway: ScriptedGateway, request: inference.GenerateRequest
    ) -> AsyncIterator[inference.GenerateResponse]:
        events = gateway.reply(request)
        if left:
            for response in events[:after]:
                yield response
            raise left.pop(0)
        for response in events:
            yield response

    return script


async def test_streams_pieces_and_believes_the_head_alone(gateway: ScriptedGateway) -> None:
    async with gateway.client() as client:
        reply = client.chat(QUESTION, max_tokens=50, min_trust=10)
        assert reply.ring is None
        deltas = [(delta.text, delta.tokens) async for delta in reply]
    assert deltas == [(text, number) for number, text in enumerate(PIECES, start=1)]
    done = reply.completion
    assert (done.text, done.finish_reason, done.model) == ("".join(PIECES), "stop", "demo")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (7, 6, 13)
    ring = gateway.cluster.roster.rings[0]
    assert reply.ring == done.ring
    assert [(one.id, one.layers) for one in done.ring.members] == [
        (one.id, one.layers) for one in ring.members
    ]
    assert (f"{done.ring.min_trust}", str(done.ring.members[0].trust)) == ("software", "hardware")
    assert (done.ring.min_trust, done.ring.roster_hash) == (10, gateway.cluster.roster.hash)
    assert [one.level for one in done.ring.members] == ["hardware", "software"]
    (request,) = gateway.requests
    assert request.envelope.WhichOneof("content") == "sealed"
    assert b"capital" not in request.SerializeToString()
    prompt, _ = gateway.open(request)
    assert prompt.prompt.chat.messages[0].content == "what is the capital?"
    assert (prompt.max_tokens, prompt.min_trust) == (50, 10)
    assert (request.max_tokens, request.min_trust) == (50, 10)


async def test_awaits_the_whole_answer_of_a_text(gateway: ScriptedGateway) -> None:
    async with gateway.client() as client:
        done = await client.complete("the capital", temperature=0.5, seed=3, stop="x", top_k=4)
    assert done.text == "".join(PIECES)
    prompt, _ = gateway.open(gateway.requests[0])
    assert prompt.prompt.text == "the capital"
    assert list(prompt.prompt.stop) == ["x"]
    assert (prompt.prompt.sampling.seed, prompt.prompt.sampling.top_k) == (3, 4)


async def test_every_request_has_an_id_and_a_ciphertext_of_its_own(gateway: ScriptedGateway) -> None:
    async with gateway.client() as client:
        await asyncio.gather(*(client.chat(QUESTION).result() for _ in range(5)))
    requests = gateway.requests
    assert len({request.envelope.sealed_for.request_id for request in requests}) == 5
    assert len({request.envelope.sealed for request in requests}) == 5


async def test_nothing_is_sent_before_the_reply_is_read(gateway: ScriptedGateway) -> None:
    async with gateway.client() as client:
        reply = client.chat(QUESTION)
        await reply.aclose()
    assert (gateway.fetched, gateway.requests) == (0, [])
    with pytest.raises(FailedPrecondition, match="not ended"):
        _ = reply.completion


@pytest.mark.parametrize("how", ["break", "aclose", "async with"])
async def test_leaving_an_answer_cancels_its_call(gateway: ScriptedGateway, how: str) -> None:
    cancelled = asyncio.Event()

    async def endless(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        try:
            for response in gateway.reply(request)[:3]:
                yield response
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    gateway.script = endless
    async with gateway.client(timeout=1000.0) as client:
        if how == "break":  # nobody keeps the reply
            async for _ in client.chat(QUESTION):
                break
        elif how == "aclose":
            reply = client.chat(QUESTION)
            await anext(aiter(reply))
            await reply.aclose()
        else:
            async with client.chat(QUESTION) as reply:
                assert (await anext(aiter(reply))).text == PIECES[0]
        async with asyncio.timeout(200):
            await cancelled.wait()


# Whom to believe


async def test_a_wrong_root_is_refused_before_anything_is_sent(gateway: ScriptedGateway) -> None:
    async with gateway.client(root_sha256="ab" * 32) as client:
        with pytest.raises(RosterError) as caught:
            await client.chat(QUESTION)
    assert caught.value.reason == "ROOT_PIN"
    assert gateway.requests == []


@pytest.mark.parametrize("root", ["", "ab", "g" * 64, "ab" * 31, b"short", "a" * 51])
async def test_a_malformed_root_is_refused_at_once(root: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        AsyncClient("127.0.0.1:1", root_sha256=root)
    assert caught.value.reason == "BAD_ROOT_HASH"


async def test_a_trust_above_the_rings_is_refused_before_anything_is_sent(gateway: ScriptedGateway) -> None:
    async with gateway.client() as client:
        with pytest.raises(FailedPrecondition) as caught:
            await client.chat(QUESTION, min_trust=20)
    assert caught.value.reason == "TRUST_BELOW_FLOOR"
    async with gateway.client(min_trust="self_signed") as client:
        with pytest.raises(FailedPrecondition):
            await client.chat(QUESTION, min_trust=10)
    assert gateway.requests == []


async def test_the_trusted_ring_is_taken_whatever_the_gateway_hints_at(gateway: ScriptedGateway) -> None:
    levels = {"demo-0": TrustLevel.SOFTWARE, "demo-1": TrustLevel.SELF_SIGNED}
    gateway.cluster = PaperCluster(levels)
    gateway.serving = [inference.RingLoad(ring="demo-0", rows=100)]
    async with gateway.client() as client:
        assert (await client.chat(QUESTION, min_trust=20)).ring.id == "demo-1"
        assert (await client.chat(QUESTION)).ring.id == "demo-0"


async def test_the_least_busy_of_the_trusted_rings_is_taken(gateway: ScriptedGateway) -> None:
    gateway.cluster = PaperCluster(dict.fromkeys(("demo-0", "demo-1", "demo-2"), TrustLevel.SOFTWARE))
    gateway.serving = [
        inference.RingLoad(ring="demo-0", rows=4, running=4),
        inference.RingLoad(ring="demo-1", rows=8, running=2),
    ]
    async with gateway.client() as client:
        assert (await client.chat(QUESTION)).ring.id == "demo-1"
        assert [(one.name, one.rings, one.min_trust) for one in await client.models()] == [("demo", 2, 10)]
        assert len(await client.rings()) == 3


@pytest.mark.parametrize("model", ["other", ""])
async def test_a_model_that_the_roster_does_not_hold_is_not_asked(
    gateway: ScriptedGateway, model: str
) -> None:
    gateway.cluster = PaperCluster(dict.fromkeys(("demo-0", "more-0"), TrustLevel.SOFTWARE))
    async with gateway.client() as client:
        with pytest.raises(NotFound) as caught:
            await client.chat(QUESTION, model=model)
    assert caught.value.reason == "MODEL_NOT_FOUND"
    assert gateway.requests == []


async def test_an_older_roster_is_refused_also_by_the_next_process(
    gateway: ScriptedGateway, tmp_path: Any
) -> None:
    memory, old = tmp_path / "deep" / "roster-state", gateway.cluster.envelope
    gateway.cluster.publish()
    async with gateway.client(state_file=memory) as client:
        await client.chat(QUESTION)
    gateway.cluster.envelope = old
    async with gateway.client(state_file=memory) as client:
        with pytest.raises(RosterError) as caught:
            await client.chat(QUESTION)
    assert caught.value.reason == "ROSTER_ROLLBACK"
    async with gateway.client() as client:  # no memory
        await client.chat(QUESTION)


@pytest.mark.parametrize("hybrid", [False, True])
async def test_prompts_are_sealed_to_either_kind_of_key(gateway: ScriptedGateway, hybrid: bool) -> None:
    roster = gateway.cluster.new_head("demo-0", hybrid=hybrid)
    head = roster.ring("demo-0").members[0].id
    assert len(roster.member(head).sealing_key) == (1216 if hybrid else 32)
    async with gateway.client() as client:
        reply = await client.chat(QUESTION)
    assert reply.ring.id == "demo-0"
    assert reply.text


async def test_a_roster_of_someone_elses_key_is_refused(gateway: ScriptedGateway) -> None:
    gateway.cluster.envelope = PaperCluster().envelope
    async with gateway.client() as client:
        with pytest.raises(RosterError) as caught:
            await client.chat(QUESTION)
    assert caught.value.reason in ("THRESHOLD_NOT_MET", "BAD_SIGNATURE", "UNKNOWN_KEY")
    assert gateway.requests == []


@pytest.mark.parametrize("field", ["roster", "root_metadata"])
async def test_rubbish_instead_of_a_roster_is_refused(gateway: ScriptedGateway, field: str) -> None:
    good = inference.GetRosterResponse(
        roster=gateway.cluster.envelope, root_metadata=gateway.cluster.root_chain
    )
    for rubbish in (b"", b"x" * 100, getattr(good, field)[:-1]):
        setattr(good, field, rubbish)
        gateway.response = good
        async with gateway.client() as client:
            with pytest.raises(RosterError):
                await client.chat(QUESTION)
    assert gateway.requests == []


async def test_a_rotated_root_is_followed_from_the_pin(gateway: ScriptedGateway) -> None:
    from sealring.mesh.crypto import Ed25519Signer
    from sealring.mesh.pki import sign_root

    cluster, pin = gateway.cluster, gateway.cluster.pin
    (first,) = cluster.authority.root_signers
    async with gateway.client() as client:
        await client.chat(QUESTION)
        fresh = Ed25519Signer.generate()
        draft = dataclasses.replace(cluster.root, version=2, root_keys=(fresh.public_key,))
        cluster.authority.root = sign_root(draft, [first, fresh], previous=cluster.root)
        cluster.publish(root_version=2)
        await asyncio.sleep(1.1)
        assert (await client.chat(QUESTION)).text
    assert cluster.pin != pin
    async with gateway.client(root_sha256=pin) as client:
        assert (await client.chat(QUESTION)).text


# Replies that are not what they should be


def plaintext(events: Events) -> Events:
    return [events[0], inference.GenerateResponse(delta=inference.Delta(text="The ", tokens=1)), *events[2:]]


def plaintext_later(events: Events) -> Events:
    return [*events[:3], inference.GenerateResponse(delta=inference.Delta(text="x", tokens=9)), *events[3:]]


def tampered(events: Events) -> Events:
    sealed = bytearray(events[2].delta.sealed)
    sealed[5] ^= 1
    events[2].delta.sealed = bytes(sealed)
    return events


def empty_chunk(events: Events) -> Events:
    events[1].delta.sealed = b""
    return events


def dropped(events: Events) -> Events:
    return [*events[:2], *events[3:]]


def repeated(events: Events) -> Events:
    return [*events[:3], events[2], *events[3:]]


def reordered(events: Events) -> Events:
    events[2], events[3] = events[3], events[2]
    return events


def cut_before_the_end(events: Events) -> Events:
    return events[:4]


def last_chunk_dropped(events: Events) -> Events:
    return [*events[:-2], events[-1]]


def stopped_by_the_gateway(events: Events) -> Events:
    events[-1].finished.reason = inference.FINISH_REASON_STOP
    return [*events[:3], events[-1]]


def more_after_the_end(events: Events) -> Events:
    return [*events[:-1], events[1], events[-1]]


def more_after_finished(events: Events) -> Events:
    return [*events, events[0]]


def of_another_ring(events: Events) -> Events:
    events[0].started.ring = "demo-7"
    return events


def started_twice(events: Events) -> Events:
    return [events[0], *events]


def never_started(events: Events) -> Events:
    return events[1:]


def nothing(events: Events) -> Events:
    return []


def an_empty_event(events: Events) -> Events:
    return [events[0], inference.GenerateResponse(), *events[1:]]


BROKEN = {
    plaintext: "PLAINTEXT_REPLY",
    plaintext_later: "PLAINTEXT_REPLY",
    tampered: "ENVELOPE_REFUSED",
    empty_chunk: "ENVELOPE_REFUSED",
    dropped: "ENVELOPE_REFUSED",
    repeated: "ENVELOPE_REFUSED",
    reordered: "ENVELOPE_REFUSED",
    cut_before_the_end: "REPLY_CUT_OFF",
    last_chunk_dropped: "REPLY_CUT_OFF",
    stopped_by_the_gateway: "REPLY_CUT_OFF",
    more_after_the_end: "REPLY_ENDED",
    more_after_finished: "REPLY_OUT_OF_ORDER",
    of_another_ring: "REPLY_OUT_OF_ORDER",
    started_twice: "REPLY_OUT_OF_ORDER",
    never_started: "REPLY_OUT_OF_ORDER",
    nothing: "REPLY_CUT_OFF",
    an_empty_event: "REPLY_OUT_OF_ORDER",
}


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
async def test_a_reply_that_is_not_the_heads_is_a_hard_error(gateway: ScriptedGateway, change: Any) -> None:
    gateway.script = changed(change)
    texts = []
    async with gateway.client() as client:
        reply = client.chat(QUESTION, max_tokens=50)
        with pytest.raises(EnvelopeError) as caught:
            async for delta in reply:
                texts.append(delta.text)
    assert caught.value.reason == BROKEN[change]
    assert "".join(PIECES).startswith("".join(texts))
    assert len(gateway.requests) == 1, "it must not be tried again"
    with pytest.raises(FailedPrecondition):
        _ = reply.completion


async def test_a_reply_to_another_request_is_refused(gateway: ScriptedGateway) -> None:
    kept: list[Events] = []

    async def swapped(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        kept.append(gateway.reply(request))
        for response in kept[0]:
            yield response

    gateway.script = swapped
    async with gateway.client() as client:
        await client.chat(QUESTION)
        with pytest.raises(EnvelopeError, match="cannot be decrypted"):
            await client.chat(QUESTION)


async def test_memory_may_end_an_answer_without_a_limit_and_is_told_as_length(
    gateway: ScriptedGateway,
) -> None:
    gateway.script = changed(last_chunk_dropped)
    async with gateway.client() as client:
        done = await client.chat(QUESTION)
    assert (done.text, done.finish_reason) == ("".join(PIECES), "length")


# Trying again


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    "reason", ["EPOCH_ENDED", "RING_GONE", "RING_DOWN", "SEALED_BY_OTHER_ROSTER", "ENVELOPE_REPLAYED"]
)
async def test_an_epoch_that_ends_before_anything_came_is_tried_again_with_a_fresh_envelope(
    gateway: ScriptedGateway, reason: str, after: int
) -> None:
    error = EnvelopeError if reason == "ENVELOPE_REPLAYED" else Unavailable
    gateway.script = failing(*(error("no", reason=reason) for _ in range(2)), after=after)
    async with gateway.client() as client:
        assert (await client.chat(QUESTION)).text == "".join(PIECES)
    requests = gateway.requests
    assert len(requests) == 3
    assert len({request.envelope.sealed_for.request_id for request in requests}) == 3
    assert len({request.envelope.sealed for request in requests}) == 3
    assert gateway.fetched == 3


async def test_an_answer_that_has_begun_goes_on(gateway: ScriptedGateway) -> None:
    gateway.script = failing(EpochEnded("gone"), EpochEnded("gone"), after=3)
    async with gateway.client() as client:
        reply = client.chat(QUESTION)
        pieces = [(delta.text, delta.tokens) async for delta in reply]
    assert pieces == [(text, number) for number, text in enumerate(PIECES, start=1)]
    assert reply.completion.text == "".join(PIECES)
    assert reply.completion.usage == Usage(7, len(PIECES) + 1)
    assert len(gateway.requests) == 3


async def test_an_answer_whose_stream_breaks_behind_its_last_token_is_whole_and_unsigned(
    gateway: ScriptedGateway,
) -> None:
    gateway.script = failing(EpochEnded("gone"), after=len(PIECES) + 2)
    async with gateway.client() as client:
        done = await client.chat(QUESTION)
    assert (done.text, done.finish_reason) == ("".join(PIECES), "stop")
    assert done.usage == Usage(7, len(PIECES) + 1)
    assert [one.head.missing for one in done.receipts] == ["NOT_SIGNED"]
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    "error",
    [Unavailable("no", reason="QUEUE"), PermissionDenied("no", reason="EPOCH_ENDED"), InvalidInput("no")],
)
async def test_other_errors_are_told_at_once(gateway: ScriptedGateway, error: SealringError) -> None:
    gateway.script = failing(error)
    async with gateway.client() as client:
        with pytest.raises(type(error)) as caught:
            await client.chat(QUESTION)
    assert caught.value.reason == error.reason
    assert len(gateway.requests) == 1


@pytest.mark.parametrize("error", [EpochEnded("gone"), EnvelopeError("no", reason="ENVELOPE_REPLAYED")])
async def test_it_is_not_tried_for_ever(gateway: ScriptedGateway, error: SealringError) -> None:
    gateway.script = failing(*(error for _ in range(20)))
    async with gateway.client() as client:
        with pytest.raises(SealringError, match=error.message):
            await client.chat(QUESTION)
    assert len(gateway.requests) == 4


async def test_the_deadline_holds_over_all_attempts(gateway: ScriptedGateway) -> None:
    gateway.script = failing(*(EpochEnded("gone") for _ in range(20)))
    async with gateway.client() as client:
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await client.chat(QUESTION, timeout=0.3)
    assert len(gateway.requests) <= 3


async def test_another_try_goes_by_the_newest_roster_and_its_trust(gateway: ScriptedGateway) -> None:
    async def moved(gateway: ScriptedGateway, request: Any) -> AsyncIterator[inference.GenerateResponse]:
        if len(gateway.requests) == 1:
            gateway.cluster.new_head("demo-0")
            raise Unavailable("no", reason="SEALED_BY_OTHER_ROSTER")
        for response in gateway.reply(request):
            yield response

    gateway.script = moved
    async with gateway.client() as client:
        done = await client.chat(QUESTION)
    assert done.ring.roster_version == 2
    assert done.text == "".join(PIECES)


async def test_another_try_avoids_the_ring_that_was_down(gateway: ScriptedGateway) -> None:
    gateway.cluster = PaperCluster(dict.fromkeys(("demo-0", "demo-1"), TrustLevel.SOFTWARE))
    gateway.serving = [inference.RingLoad(ring="demo-0", rows=9)]
    gateway.script = failing(Unavailable("no", reason="RING_DOWN"))
    async with gateway.client() as client:
        assert (await client.chat(QUESTION)).ring.id == "demo-1"


# What is asked


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"messages": []}, "EMPTY_PROMPT"),
        ({"messages": [{"role": "user"}]}, "BAD_MESSAGE"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "BAD_MESSAGE"),
        ({"messages": [{"role": "user", "content": 5}]}, "BAD_MESSAGE"),
        ({"messages": [{"role": "function", "content": "x"}]}, "BAD_ROLE"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "BAD_UTF8"),
        ({"temperature": 3.0}, "BAD_SAMPLING"),
        ({"temperature": float("nan")}, "BAD_SAMPLING"),
        ({"seed": -1}, "BAD_SAMPLING"),
        ({"seed": 1 << 64}, "BAD_SAMPLING"),
        ({"top_p": 0.0}, "BAD_SAMPLING"),
        ({"stop": ""}, "BAD_STOP"),
        ({"stop": ["x"] * 17}, "BAD_STOP"),
        ({"max_tokens": -1}, "BAD_MAX_TOKENS"),
        ({"max_tokens": 1 << 40}, "BAD_MAX_TOKENS"),
        ({"min_trust": 31}, "BAD_MIN_TRUST"),
        ({"min_trust": -1, "max_tokens": -1}, "BAD_MAX_TOKENS"),
        ({"timeout": 4000.0}, "BAD_TIMEOUT"),
        ({"timeout": -1.0}, "BAD_TIMEOUT"),
        ({"timeout": 0.0}, "BAD_TIMEOUT"),
    ],
)
async def test_a_bad_question_is_refused_at_once(arguments: dict[str, Any], reason: str) -> None:
    client = AsyncClient("127.0.0.1:1", root_sha256="ab" * 32)
    with pytest.raises(InvalidInput) as caught:
        client.chat(**{"messages": QUESTION, **arguments})
    assert caught.value.reason == reason
    await client.close()


async def test_a_gateway_that_is_not_there_is_named_so() -> None:
    async with AsyncClient("127.0.0.1:1", root_sha256="ab" * 32) as client:
        with pytest.raises(Unavailable):
            await client.chat(QUESTION)


async def test_neither_question_nor_answer_is_in_a_repr(gateway: ScriptedGateway) -> None:
    async with gateway.client() as client:
        reply = client.chat(QUESTION)
        shown = [repr(delta) async for delta in reply]
    shown += [repr(reply), repr(reply.completion)]
    assert not [text for text in shown for word in ("capital", "Paris") if word in text]


async def two_answers(
    gateway: ScriptedGateway, request: inference.GenerateRequest
) -> AsyncIterator[inference.GenerateResponse]:
    asked, sealer = gateway.open(request)
    yield inference.GenerateResponse(started=inference.Started(ring="demo-0"))
    for choice in range(asked.choices):
        delta = inference.SealedDelta(
            text=f"answer {choice}", tokens=1, choice=choice, finish=inference.FINISH_REASON_STOP
        )
        sealed = sealer.seal(delta.SerializeToString(), last=choice + 1 == asked.choices)
        yield inference.GenerateResponse(delta=inference.Delta(sealed=sealed))
    yield inference.GenerateResponse(finished=inference.Finished())


@pytest.mark.parametrize("way", ["chat", "complete", "ask"])
async def test_all_that_a_request_may_say_reaches_the_gateway(gateway: ScriptedGateway, way: str) -> None:
    """And the cache key does not: the ring is chosen by it here."""
    said: dict[str, Any] = {
        "chat": QUESTION,
        "complete": "the capital",
        "ask": inference.Prompt(text="the capital"),
    }
    gateway.script = two_answers
    async with gateway.client(user="somebody") as client:
        reply = getattr(client, way)(
            said[way],
            n=2,
            priority=-3,
            deadline_ms=5000,
            max_tokens=9,
            min_trust=10,
            prompt_cache_key="conversation 41",
        )
        done = await reply
    assert [choice.text for choice in done.choices] == ["answer 0", "answer 1"]
    (request,) = gateway.requests
    assert (request.priority, request.deadline_ms, request.choices) == (-3, 5000, 2)
    assert (request.max_tokens, request.min_trust) == (9, 10)
    assert not request.HasField("prompt_cache_key")
    inside, _ = gateway.open(request)
    for sent in (request, inside):
        assert b"conversation 41" not in sent.SerializeToString()
    assert gateway.users == ["somebody"]


async def test_a_conversation_stays_with_its_ring_and_others_go_elsewhere(gateway: ScriptedGateway) -> None:
    rings = [f"demo-{number}" for number in range(3)]
    gateway.cluster = PaperCluster(dict.fromkeys(rings, TrustLevel.SOFTWARE))
    gateway.serving = [inference.RingLoad(ring=ring, rows=16) for ring in rings]
    system = {"role": "system", "content": "you answer questions about capitals " * 10}
    homes: set[str] = set()
    async with gateway.client() as client:
        for number in range(100):  # homes are drawn, so a dozen may all be of two rings
            if homes == set(rings):
                break
            turns = [system, {"role": "user", "content": f"question {number}"}]
            first = await client.chat(turns)
            turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "more"}]
            assert (await client.chat(turns)).ring == first.ring
            homes.add(first.ring.id)
        assert homes == set(rings)
        keyed = {(await client.complete(f"text {n}", prompt_cache_key="one")).ring.id for n in range(6)}
        assert len(keyed) == 1
        spread = {(await client.chat(turns, prompt_cache_key="")).ring.id for _ in range(60)}
        assert spread == set(rings)


async def test_a_ring_that_is_down_loses_a_key_only_while_it_is(gateway: ScriptedGateway) -> None:
    rings = ["demo-0", "demo-1"]
    gateway.cluster = PaperCluster(dict.fromkeys(rings, TrustLevel.SOFTWARE))
    gateway.serving = [inference.RingLoad(ring=ring, rows=16) for ring in rings]
    async with gateway.client() as client:
        home = (await client.chat(QUESTION, prompt_cache_key="one")).ring.id
        gateway.script = failing(Unavailable("gone", reason="RING_DOWN"))
        assert (await client.chat(QUESTION, prompt_cache_key="one")).ring.id != home
        assert (await client.chat(QUESTION, prompt_cache_key="one")).ring.id == home


@pytest.mark.parametrize("key", ["x" * 257, "x" * 10_240, "\ud800"])
async def test_a_bad_cache_key_is_refused_at_once(gateway: ScriptedGateway, key: str) -> None:
    async with gateway.client() as client:
        with pytest.raises(InvalidInput) as caught:
            client.chat(QUESTION, prompt_cache_key=key)
    assert caught.value.metadata["param"] == "prompt_cache_key"


@pytest.mark.parametrize("user", ["x" * 257, "na\u00efve", "a\nb", "a\r\nauthorization: b"])
def test_a_users_name_that_is_no_metadata_is_refused(user: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        AsyncClient("127.0.0.1:1", root_sha256="ab" * 32, user=user)
    assert caught.value.reason == "BAD_USER"


async def test_what_the_gateway_says_of_a_model_is_told_if_it_can_be_a_name(gateway: ScriptedGateway) -> None:
    for said, known in (("llama", "llama"), ("<script>", ""), ("x" * 65, ""), ("", "")):
        gateway.serving = [
            inference.RingLoad(
                ring="demo-0", rows=7, model_type=said, capabilities=["thinking", said, "tools"]
            )
        ]
        async with gateway.client() as client:
            (model,) = await client.models()
        assert (model.model_type, model.rows, model.rings) == (known, 7, 1)
        assert model.capabilities == ("tools", "thinking")


async def test_an_answer_goes_on_over_another_gateway(gateway: ScriptedGateway) -> None:
    """The second continues where the first one was lost, and nothing is shown or counted twice."""
    lost = failing(Unavailable("gone"), after=3)
    gateway.script = lost
    async with ScriptedGateway() as second, gateway.client() as client:
        second.cluster = gateway.cluster
        client.gateways = Gateways([gateway.address, second.address])
        reply = client.chat(QUESTION)
        texts = [delta.text async for delta in reply]
        await client.chat(QUESTION)
    assert texts == list(PIECES)
    assert reply.completion.usage == Usage(7, 6)
    assert [len(one.requests) for one in (gateway, second)] == [1, 2]
    resumed = second.open(second.requests[0])[0]
    assert len(resumed.prompt.resume.tokens) == 2


async def test_a_gateway_that_is_not_there_is_left_and_none_at_all_is_told_at_once(
    gateway: ScriptedGateway,
) -> None:
    nobody = "127.0.0.1:1"
    async with AsyncClient([nobody, gateway.address], root_sha256=gateway.cluster.pin) as client:
        assert (await client.chat(QUESTION)).text == "".join(PIECES)
        assert client.gateways.in_turn() == (gateway.address, nobody)
    async with AsyncClient([nobody, nobody], root_sha256=gateway.cluster.pin) as client:
        with pytest.raises(Unavailable):
            await client.chat(QUESTION)


def unloaded(gateway: ScriptedGateway, **fields: Any) -> None:
    """A roster without a ring, and a gateway that lists the model as on demand; a load brings the ring."""
    rings = gateway.cluster.draft.rings
    gateway.cluster.publish(rings=())
    listed = {"name": "demo", "availability": inference.MODEL_AVAILABILITY_NOT_LOADED, "context": 512}
    gateway.models = [inference.Model(**(listed | fields))]
    gateway.on_load = lambda: gateway.cluster.publish(rings=rings) and None


async def test_a_model_that_is_not_loaded_is_loaded_before_anything_is_sealed(
    gateway: ScriptedGateway,
) -> None:
    unloaded(gateway, aliases=["gpt-4o", "claude-*"])
    async with gateway.client() as client:
        (model,) = await client.models()
        assert (model.name, model.rings, model.context) == ("demo", 0, 512)
        for name in ("gpt-4o", "claude-opus-5", "demo"):
            done = await client.chat(QUESTION, model=name, keep_alive=60)
            assert (done.text, done.model) == ("".join(PIECES), "demo")
    assert [(one.model, one.keep_alive) for one in gateway.loads] == [("demo", 60)]
    assert [request.keep_alive for request in gateway.requests] == [60, 60, 60]


async def test_a_load_that_a_gateway_drops_is_asked_for_again_as_long_as_the_user_waits(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "GATEWAY_SECONDS", 0.0)
    unloaded(gateway)
    load = gateway.on_load

    def asleep() -> None:
        if len(gateway.loads) <= 3:
            raise Unavailable("asleep")
        load()

    gateway.on_load = asleep
    async with gateway.client() as client:
        assert (await client.chat(QUESTION, model="demo")).text == "".join(PIECES)
    assert len(gateway.loads) == 4


async def test_an_answer_says_how_long_its_model_took_to_load(gateway: ScriptedGateway) -> None:
    unloaded(gateway)
    async with gateway.client() as client:
        replies = [client.chat(QUESTION, model="demo") for _ in range(2)]
        for reply in replies:
            await reply
    assert replies[0].load_seconds > replies[1].load_seconds == 0.0


async def test_a_model_that_is_unloaded_before_anything_is_sealed_is_loaded_again(
    gateway: ScriptedGateway,
) -> None:
    unloaded(gateway)
    publish, loads = gateway.on_load, list[int]()

    def load() -> None:
        loads.append(1)
        if len(loads) == 2:
            publish()

    gateway.on_load = load
    async with gateway.client() as client:
        assert (await client.chat(QUESTION)).model == "demo"
    assert len(loads) == 2


async def test_a_digest_behind_a_name_is_held_against_the_verified_roster(gateway: ScriptedGateway) -> None:
    """So a gateway that lies about an alias has nothing sealed for the model that it prefers."""
    named = {"name": "demo", "aliases": ["big"], "availability": inference.MODEL_AVAILABILITY_LOADED}
    gateway.models = [inference.Model(**named, digest="ab" * 32)]
    digest = gateway.cluster.roster.rings[0].model_digest.hex()
    async with gateway.client() as client:
        for name in ("demo", "big", ""):
            done = await client.chat(QUESTION, model=f"{name}@{digest}")
            assert (done.model, done.ring.model_digest) == ("demo", digest)
            with pytest.raises(FailedPrecondition) as caught:
                await client.chat(QUESTION, model=f"{name}@{'ab' * 32}")
            assert caught.value.reason == "MODEL_DIFFERS"
        with pytest.raises(InvalidInput) as bad:
            await client.chat(QUESTION, model="demo@latest")
        assert bad.value.reason == "BAD_DIGEST"
    assert len(gateway.requests) == 3


async def test_who_has_no_time_for_a_load_hears_so(gateway: ScriptedGateway) -> None:
    unloaded(gateway)

    def refuse() -> None:
        raise Unavailable("demo cannot be loaded: too large", reason="DOES_NOT_FIT")

    gateway.on_load = refuse
    async with gateway.client() as client:
        with pytest.raises(Unavailable) as caught:
            await client.chat(QUESTION)
    assert caught.value.reason == "DOES_NOT_FIT"
    assert not gateway.requests


async def test_a_gateways_aliases_count_only_where_the_roster_has_no_such_name(
    gateway: ScriptedGateway,
) -> None:
    gateway.models = [
        inference.Model(name="other", aliases=["demo"], availability=inference.MODEL_AVAILABILITY_NOT_LOADED),
        inference.Model(name="bad name", availability=inference.MODEL_AVAILABILITY_NOT_LOADED),
    ]
    async with gateway.client() as client:
        assert (await client.chat(QUESTION, model="demo")).model == "demo"
        assert [model.name for model in await client.models()] == ["demo", "other"]
    assert not gateway.loads
