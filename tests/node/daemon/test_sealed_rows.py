"""A control stream carries sealed output or none for a sealed row, whatever the gateway does."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowoutput import row_output

from sealring.mesh.errors import (
    EnvelopeError,
    FailedPrecondition,
    InvalidInput,
    ResourceExhausted,
    Unavailable,
)
from sealring.mesh.prompt.sealed import ReplayGuard, ReplyOpener, RequestInfo, SealingKey, seal_request
from sealring.mesh.roster import Roster
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.daemon import sealed_rows
from sealring.node.daemon.sealed_rows import CHUNK_BYTES, SealedRows, Unsealer
from sealring.testing import PaperCluster
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

SECRET = "swordfish"
NOW = 1_800_000_000


def clock() -> float:
    return NOW


class Plan:
    ring, deployment, epoch = "demo-0", "demo", 1

    def __init__(self, cluster: PaperCluster) -> None:
        self.members = cluster.roster.ring("demo-0").members


class Head:
    """A head on paper, and a client that trusts its roster."""

    def __init__(self, level: TrustLevel = TrustLevel.SOFTWARE) -> None:
        self.cluster = PaperCluster({"demo-0": level}, size=2, clock=clock)
        self.plan: Any = Plan(self.cluster)
        self.unsealer = Unsealer(key=self.cluster.keys["demo-0"], own_id=self.plan.members[0].id, clock=clock)
        self.unsealer.learn(self.cluster.roster)

    def seal(
        self, row: int = 1, *, roster: Roster | None = None, body: bytes | None = None, **changes: Any
    ) -> tuple[control.OpenRow, ReplyOpener]:
        named = roster or self.cluster.roster
        expires = NOW + 60
        info = RequestInfo("demo", secrets.token_bytes(16), expires, named.hash)
        fields = {"prompt": inference.Prompt(text=SECRET), "max_tokens": 9, **changes}
        body = inference.SealedPrompt(**fields).SerializeToString() if body is None else body
        key = self.cluster.keys["demo-0"].public_key
        sealed, opener = seal_request(key, info, body)
        to = inference.SealedFor(
            ring="demo-0", request_id=info.request_id, expires=expires, roster_hash=named.hash
        )
        envelope = inference.Envelope(sealed=sealed, sealed_for=to)
        return control.OpenRow(row=row, deployment="demo", envelope=envelope, max_tokens=9), opener


def test_a_prompt_is_opened_for_the_ring_that_was_verified() -> None:
    head = Head()
    body, _ = head.unsealer.open(head.seal()[0], head.plan)
    assert body.prompt.text == SECRET
    older = head.cluster.roster
    head.unsealer.learn(head.cluster.publish())
    assert head.unsealer.open(head.seal(roster=older)[0], head.plan)[0].prompt.text == SECRET
    assert head.unsealer.open(head.seal()[0], head.plan)[0].prompt.text == SECRET


def refused(head: Head, reason: str, **changes: Any) -> None:
    with pytest.raises((Unavailable, EnvelopeError, FailedPrecondition)) as caught:
        head.unsealer.open(head.seal(**changes)[0], head.plan)
    assert caught.value.reason == reason
    assert SECRET not in str(caught.value)


def test_a_roster_that_this_head_has_not_seen_is_refused() -> None:
    head = Head()
    head.cluster.publish()
    refused(head, "SEALED_BY_OTHER_ROSTER")


def test_a_ring_of_others_than_the_sender_knew_is_refused() -> None:
    head = Head()
    ring = head.cluster.draft.rings[0]
    swapped = (ring.members[0], dataclasses.replace(ring.members[1], id="someone-else"))
    head.plan.members = swapped
    refused(head, "SEALED_BY_OTHER_ROSTER")


def test_a_prompt_for_one_ring_of_a_head_is_not_opened_for_another() -> None:
    head = Head()
    ring = head.cluster.draft.rings[0]
    other = dataclasses.replace(ring, id="small-0", deployment="small")
    head.unsealer.learn(head.cluster.publish(rings=(ring, other)))
    head.unsealer.open(head.seal()[0], head.plan)
    head.plan.ring, head.plan.deployment = "small-0", "small"
    refused(head, "ENVELOPE_REFUSED")
    head.plan.ring = "absent-0"
    refused(head, "SEALED_BY_OTHER_ROSTER")


def test_a_roster_that_moved_the_layers_makes_older_prompts_stale() -> None:
    head = Head()
    older = head.cluster.roster
    ring = head.cluster.draft.rings[0]
    first, second = ring.members
    moved = (dataclasses.replace(first, layers=(0, 2)), dataclasses.replace(second, layers=(2, 6)))
    head.unsealer.learn(head.cluster.publish(rings=(dataclasses.replace(ring, members=moved),)))
    refused(head, "SEALED_BY_OTHER_ROSTER", roster=older)
    refused(head, "SEALED_BY_OTHER_ROSTER")  # the epoch still has the old ones
    head.plan.members = moved
    head.unsealer.open(head.seal()[0], head.plan)


def test_the_receipt_of_an_answer_that_goes_on_in_a_moved_ring_names_a_roster_that_has_it() -> None:
    head = Head()
    older, ring = head.cluster.roster, head.cluster.draft.rings[0]
    first, second = ring.members
    moved = (dataclasses.replace(first, prompts=(0, 4)), dataclasses.replace(second, prompts=(4, 6)))
    newer = head.cluster.publish(rings=(dataclasses.replace(ring, members=moved),))
    head.unsealer.learn(newer)
    assert head.unsealer.roster(older.hash, head.plan) == older
    head.plan.members = moved
    assert head.unsealer.roster(older.hash, head.plan) == newer


def test_a_trust_that_has_fallen_since_is_refused() -> None:
    head = Head(TrustLevel.SELF_SIGNED)
    older = head.cluster.roster
    members = tuple(
        dataclasses.replace(one, level=TrustLevel.SOFTWARE, trust=10)
        if one.level is TrustLevel.SELF_SIGNED
        else one
        for one in head.cluster.draft.members
    )
    head.unsealer.open(head.seal(min_trust=20)[0], head.plan)
    head.unsealer.learn(head.cluster.publish(members=members))
    refused(head, "SEALED_BY_OTHER_ROSTER", roster=older)
    refused(head, "TRUST_BELOW_FLOOR", min_trust=20)


def test_a_key_of_an_earlier_life_is_refused() -> None:
    head = Head()
    head.unsealer = Unsealer(key=SealingKey(), own_id=head.plan.members[0].id, clock=clock)
    head.unsealer.learn(head.cluster.roster)
    refused(head, "SEALED_BY_OTHER_ROSTER")


def test_an_expired_roster_is_refused() -> None:
    head = Head()
    later = head.cluster.roster.expires + 61
    head.unsealer = Unsealer(
        key=head.cluster.keys["demo-0"], own_id=head.plan.members[0].id, clock=lambda: later
    )
    head.unsealer.learn(head.cluster.roster)
    refused(head, "SEALED_BY_OTHER_ROSTER")


def test_a_node_that_left_its_ring_opens_nothing() -> None:
    head = Head()
    older = head.cluster.roster
    head.unsealer.learn(head.cluster.publish(rings=()))
    refused(head, "SEALED_BY_OTHER_ROSTER", roster=older)


def test_rosters_are_forgotten_in_their_order() -> None:
    head = Head()
    first = head.cluster.roster
    learnt = [head.cluster.publish() for _ in range(sealed_rows.MAX_ROSTERS)]
    for roster in learnt:
        head.unsealer.learn(roster)
    refused(head, "SEALED_BY_OTHER_ROSTER", roster=first)
    for roster in learnt:
        head.unsealer.open(head.seal(roster=roster)[0], head.plan)


def test_limits_are_those_that_were_sealed_and_rubbish_is_none() -> None:
    head = Head()
    refused(head, "ENVELOPE_CHANGED", max_tokens=8)
    refused(head, "ENVELOPE_REFUSED", body=b"\xff\xff\xff")


def done(step: int, *outputs: control.RowOutput) -> bytes:
    return engine.EngineEvent(done=control.StepDone(step=step, outputs=outputs)).SerializeToString()


def outputs(event: bytes) -> list[control.RowOutput]:
    return list(engine.EngineEvent.FromString(event).done.outputs)


def evict(step: int, row: int) -> control.Step:
    return control.Step(number=step, changes=[control.Change(evict=control.Evict(row=row))])


def test_a_prompt_that_is_refused_uses_up_no_id() -> None:
    """Else whoever seals nonsense fills the head's table of ids, and shuts everybody's prompts out."""
    head, rows = Head(), SealedRows()
    for changes in ({"max_tokens": 8}, {"choices": 2}, {"min_trust": 20}, {"body": b"\xff"}):
        row, _ = head.seal(**changes)
        for _ in range(2):
            with pytest.raises((EnvelopeError, FailedPrecondition)) as caught:
                head.unsealer.open(row, head.plan)
            assert caught.value.reason != "ENVELOPE_REPLAYED"
    row, _ = head.seal()
    for number in (1, 2):  # the engine refuses it: it is too long
        rows.add(number, head.unsealer.open(row, head.plan)[1])
        rows.seal(engine.EngineEvent(refused=control.RowRefused(row=number)).SerializeToString())
    rows.add(3, head.unsealer.open(row, head.plan)[1])
    told = row_output(3, text=SECRET, tokens=1)
    rows.seal(engine.EngineEvent(done=control.StepDone(step=1, outputs=[told])).SerializeToString())
    rows.seal(engine.EngineEvent(refused=control.RowRefused(row=3)).SerializeToString())
    with pytest.raises(EnvelopeError, match="taken before"):
        head.unsealer.open(row, head.plan)


def test_ids_count_among_those_of_the_client_that_the_gateway_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_rows, "ReplayGuard", functools.partial(ReplayGuard, 4))
    head = Head()

    def ask(client: bytes) -> None:
        row, _ = head.seal()
        row.client = client
        head.unsealer.open(row, head.plan)

    ask(b"greedy")
    ask(b"greedy")
    with pytest.raises(ResourceExhausted):
        ask(b"greedy")
    ask(b"modest")


def test_nothing_is_touched_before_a_sealed_row() -> None:
    rows = SealedRows()
    rows.check(1)
    rows.add(1, None)
    event = done(1, row_output(1, text="clear", tokens=1))
    assert rows.seal(event) is event


def test_chunks_have_one_length_and_the_last_one_says_all() -> None:
    head, rows = Head(), SealedRows()
    row, opener = head.seal()
    rows.add(1, head.unsealer.open(row, head.plan)[1])
    opened = engine.EngineEvent(
        opened=control.RowOpened(row=1, prompt_tokens=21, answered=4)
    ).SerializeToString()
    assert rows.seal(opened) == opened
    sizes, texts = set(), ["a", "bb" * 8, "\N{SNOWMAN}" * 12, "", "x" * 30]
    for number, text in enumerate(texts, start=1):
        finish = inference.FINISH_REASON_STOP if number == len(texts) else 0
        told = row_output(1, text=text, tokens=number, finish=finish, token=9, held=logged(0))
        (output,) = outputs(rows.seal(done(number, told)))
        assert output == row_output(1, tokens=number, finish=finish, sealed=output.delta.sealed)
        chunk, last = opener.open(output.delta.sealed)
        sizes.add(len(chunk))
        delta = inference.SealedDelta.FromString(chunk)
        assert (delta.text, delta.tokens, last) == (text, number, bool(finish))
        assert (delta.token, list(delta.held)) == (9, logged(0))
        assert delta.prompt_tokens == (17 if number == 1 or last else 0)
    assert sizes == {2 * CHUNK_BYTES}


def test_row_numbers_rise_and_open_rows_are_bounded() -> None:
    head, rows = Head(), SealedRows()
    rows.check(3)
    for row in (3, 2, 0):
        with pytest.raises(InvalidInput):
            rows.check(row)
    rows.add(4, head.unsealer.open(head.seal()[0], head.plan)[1])
    rows.add(5, None, sealed_rows.MAX_ROWS - 1)
    with pytest.raises(ResourceExhausted):
        rows.add(5 + sealed_rows.MAX_ROWS, None)


def logged(others: int, spelling: bytes = SECRET.encode()) -> list[inference.TokenLogprob]:
    top = [inference.TopLogprob(id=each, spelling=spelling, logprob=-1.5) for each in range(others)]
    return [inference.TokenLogprob(id=7, spelling=spelling, logprob=-0.5, top=top)]


def test_log_probabilities_are_sealed_and_their_lengths_do_not_tell() -> None:
    head, rows = Head(), SealedRows()
    row, opener = head.seal()
    rows.add(1, head.unsealer.open(row, head.plan)[1])
    sizes = set()
    for number, spelling in enumerate((b"a", b" swordfish", "☃☃☃".encode() * 4), start=1):
        told = row_output(1, text="x" * number, tokens=number, logprobs=logged(20, spelling))
        (output,) = outputs(rows.seal(done(number, told)))
        assert output.delta.WhichOneof("content") == "sealed"
        assert not output.delta.logprobs
        delta = inference.SealedDelta.FromString(opener.open(output.delta.sealed)[0])
        assert list(delta.logprobs) == logged(20, spelling)
        sizes.add(delta.ByteSize())
    assert sizes == {22 * CHUNK_BYTES}
    (output,) = outputs(rows.seal(done(4, row_output(1, tokens=4, logprobs=logged(0)))))
    assert opener.open(output.delta.sealed)  # a token without text is sent, too


events = st.lists(
    st.one_of(
        st.tuples(st.just("sealed"), st.integers(1, 5)),
        st.tuples(st.just("clear"), st.integers(1, 5)),
        st.tuples(st.just("discard"), st.integers(1, 5)),
        st.tuples(st.just("evict"), st.integers(1, 5)),
        st.tuples(st.just("refused"), st.integers(1, 5)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("finish"), st.integers(1, 5)),
    ),
    max_size=40,
)
HEAD = Head()


@given(events)
@settings(max_examples=200, deadline=None)
def test_no_order_of_events_lets_out_what_was_sealed(events: list[tuple[str, int]]) -> None:
    """An engine is played that goes on telling of every row, finished, discarded and evicted ones too."""
    rows, opened, step = SealedRows(), dict[int, bool](), 0
    gone: set[int] = set()
    for kind, row in events:
        if kind in ("sealed", "clear"):
            try:
                rows.check(row)
            except InvalidInput:
                continue
            opened[row] = kind == "sealed"
            rows.add(row, HEAD.unsealer.open(HEAD.seal()[0], HEAD.plan)[1] if opened[row] else None)
        elif kind == "discard":
            rows.discard(row)
            gone.add(row)
        elif kind == "evict":
            rows.evict(evict(step + 1, row))
            gone.add(row)
        elif kind == "refused":
            rows.seal(engine.EngineEvent(refused=control.RowRefused(row=row)).SerializeToString())
            gone.add(row)
        else:
            step += 1
            finish = inference.FINISH_REASON_STOP if kind == "finish" else 0
            told = [
                row_output(one, text=SECRET, tokens=1, finish=finish, logprobs=logged(2)) for one in opened
            ]
            try:
                out = rows.seal(done(step, *told))
            except EnvelopeError:  # the reply had ended: the epoch ends
                return
            for output in outputs(out):
                if opened[output.row]:
                    assert SECRET.encode() not in output.SerializeToString()
                    assert not output.delta.logprobs
                elif output.row not in gone:
                    assert output.delta.text == SECRET
                    assert list(output.delta.logprobs) == logged(2)


def test_the_choices_of_a_sealed_prompt_are_sealed_by_one_count() -> None:
    head, rows = Head(), SealedRows()
    row, opener = head.seal(choices=2)
    row.choices = 2
    rows.check(1, 2)
    rows.add(1, head.unsealer.open(row, head.plan)[1], 2)
    with pytest.raises(InvalidInput):
        rows.check(2)
    told = []
    for number, (at, finish) in enumerate([(1, 0), (2, 1), (1, 1)], start=1):
        event = done(number, row_output(at, text="x", tokens=number, finish=finish))
        (output,) = outputs(rows.seal(event))
        chunk, last = opener.open(output.delta.sealed)
        told.append((inference.SealedDelta.FromString(chunk).choice, last))
    assert told == [(0, False), (1, False), (0, True)]


def test_copies_that_never_were_are_forgotten_with_their_row() -> None:
    head, rows = Head(), SealedRows()
    row, _ = head.seal(choices=3)
    row.choices = 3
    rows.add(1, head.unsealer.open(row, head.plan)[1], 3)
    rows.evict(evict(1, 1))
    rows.seal(done(1))
    (output,) = outputs(rows.seal(done(2, row_output(3, text=SECRET))))
    assert output.delta.WhichOneof("content") is None


def test_a_gateway_cannot_change_the_number_of_choices() -> None:
    head = Head()
    row, _ = head.seal(choices=2)
    with pytest.raises(EnvelopeError, match="choices"):
        head.unsealer.open(row, head.plan)


@pytest.mark.parametrize(
    ("size", "length"),
    [
        *((0, None), (1, None), (2, None), (3, 1), (129, 127), (130, None), (131, 128)),
        *((16_386, 16_383), (16_387, None), (16_388, 16_384), ((1 << 21) + 3, (1 << 21) - 1)),
        ((1 << 21) + 4, None),
    ],
)
def test_padding_takes_exactly_so_many_bytes_or_cannot(size: int, length: int | None) -> None:
    assert sealed_rows.field_length(size) == length
    if length is not None:
        assert inference.SealedDelta(padding=bytes(length)).ByteSize() == size


def test_a_delta_is_padded_to_the_next_multiple_that_there_is() -> None:
    for text in range(200):
        plain = inference.SealedDelta(text="x" * text)
        padded = sealed_rows.padded(inference.SealedDelta(text="x" * text))
        assert inference.SealedDelta.FromString(padded).text == "x" * text
        made = len(padded)
        assert made % CHUNK_BYTES == 0
        missing = -plain.ByteSize() % CHUNK_BYTES
        assert made - plain.ByteSize() == missing + CHUNK_BYTES * (missing in (1, 2))
