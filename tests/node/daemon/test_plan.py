import dataclasses
from typing import Any

import pytest

from sealring.mesh.errors import SealringError
from sealring.mesh.rpc import PROTOCOL_VERSION
from sealring.node.daemon.plan import plan_epoch
from sealring.v1 import membership_pb2


def prepare(roster: Any, **changes: Any) -> membership_pb2.PrepareEpoch:
    ring = roster.rings[0]
    fields = {
        "ring": ring.id,
        "epoch": 4,
        "roster_version": roster.version,
        "roster_hash": roster.hash,
        "model": ring.model,
        "model_digest": ring.model_digest.hex(),
        "context": ring.context,
        "max_rows": 4,
        "kv_budget": 1 << 20,
        "prefill_chunk": 16,
        "protocol": PROTOCOL_VERSION,
    }
    return membership_pb2.PrepareEpoch(**{**fields, **changes})


@pytest.mark.parametrize("size", [2, 3])
def test_a_place_in_a_ring(cluster, size: int) -> None:
    parties = [cluster.party() for _ in range(size)]
    _, roster = cluster.roster(parties, layers=3 * size)
    for rank, party in enumerate(parties):
        plan = plan_epoch(prepare(roster), roster, party.id)
        assert (plan.rank, plan.size, plan.layers) == (rank, size, (3 * rank, 3 * rank + 3))
        outgoing, incoming = plan.links
        assert not outgoing.receives
        assert incoming.receives
        assert outgoing.params.peer_id == parties[(rank + 1) % size].id
        assert incoming.params.peer_id == parties[rank - 1].id
        assert outgoing.params.initiates == (rank < (rank + 1) % size)
        assert incoming.params.initiates == (rank < (rank - 1) % size)
        assert outgoing.params.epoch == 4
        assert len(plan.releases) == 1


@pytest.mark.parametrize(("size", "protocol", "seals"), [(3, 13, True), (2, 13, False), (3, 12, False)])
def test_parameters_are_sealed_past_members_in_between_that_all_know_how(
    cluster, size: int, protocol: int, seals: bool
) -> None:
    parties = [cluster.party() for _ in range(size)]
    _, roster = cluster.roster(parties, layers=3 * size)
    plans = [plan_epoch(prepare(roster, protocol=protocol), roster, party.id) for party in parties]
    assert {plan.seals_rows for plan in plans} == {seals}
    assert [[link.closes for link in plan.links] for plan in plans] == [
        [size > 2 and rank == size - 1, size > 2 and rank == 0] for rank in range(size)
    ]


def test_layers_that_compute_prompts_are_those_of_the_roster(cluster) -> None:
    parties = [cluster.party() for _ in range(3)]
    _, roster = cluster.roster(parties, layers=9)
    (ring,) = roster.rings
    cut = [(0, 5), (5, 6), (6, 9)]
    places = [dataclasses.replace(one, prompts=each) for one, each in zip(ring.members, cut, strict=True)]
    changed = dataclasses.replace(roster, rings=(dataclasses.replace(ring, members=tuple(places)),))
    plans = [plan_epoch(prepare(changed), changed, party.id) for party in parties]
    assert [plan.layers for plan in plans] == [(0, 3), (3, 6), (6, 9)]
    assert [plan.prompts for plan in plans] == [(0, 5), (5, 6), (0, 0)], "the last has no others"


def test_members_that_run_other_software_are_seen(cluster) -> None:
    parties = [cluster.party() for _ in range(3)]
    _, roster = cluster.roster(parties)
    changed = dataclasses.replace(roster.members[1], manifest_hash=b"2" * 32)
    mixed = dataclasses.replace(roster, members=(roster.members[0], changed, roster.members[2]))
    plan = plan_epoch(prepare(mixed), mixed, parties[0].id)
    assert plan.releases == tuple(sorted({roster.members[0].manifest_hash, b"2" * 32}))


def test_a_ring_of_one_has_no_links(cluster) -> None:
    party = cluster.party()
    _, roster = cluster.roster([party])
    plan = plan_epoch(prepare(roster, kv_bits=4, speculate=True), roster, party.id)
    assert plan.links == ()
    assert (plan.kv_bits, plan.speculate) == (4, True)


DRAFT = {"model": "small", "digest": "ab" * 32, "kv_bits": 8, "context": 4096}


def test_the_head_has_a_draft_model(cluster) -> None:
    parties = [cluster.party() for _ in range(2)]
    _, roster = cluster.roster(parties)
    asked = prepare(roster, speculate=True, draft=DRAFT)
    draft = plan_epoch(asked, roster, parties[0].id).draft
    assert draft is not None
    assert (draft.model, draft.digest, draft.kv_bits, draft.context) == ("small", "ab" * 32, 8, 4096)
    assert plan_epoch(prepare(roster), roster, parties[0].id).draft is None
    bad = [{"digest": "x"}, {"kv_bits": 3}, {"context": 0}, {"commit": "x"}, {"hub_files": "x"}]
    wrong = [prepare(roster, speculate=True, draft=DRAFT | change) for change in bad]
    for one, party in [*((each, parties[0]) for each in wrong), (asked, parties[1])]:
        with pytest.raises(SealringError) as caught:
            plan_epoch(one, roster, party.id)
        assert caught.value.reason == "BAD_EPOCH"


def test_the_tail_has_the_drafter_that_reads_hidden_states(cluster) -> None:
    parties = [cluster.party() for _ in range(3)]
    _, roster = cluster.roster(parties)
    plain, drafted = ({"speculate": True, "taps": [1, 3]} | more for more in ({}, {"draft": DRAFT}))
    plans = [
        plan_epoch(prepare(roster, **given), roster, party.id)
        for given, party in zip((plain, plain, drafted), parties, strict=True)
    ]
    assert [plan.taps for plan in plans] == [(1, 3)] * 3
    assert [plan.draft is not None for plan in plans] == [False, False, True]
    wrong = [drafted, *(plain | {"taps": taps} for taps in ([3, 1], [1, 1], range(17), [1 << 20]))]
    for given in [*wrong, plain | {"speculate": False}]:
        with pytest.raises(SealringError) as caught:
            plan_epoch(prepare(roster, **given), roster, parties[0].id)
        assert caught.value.reason == "BAD_EPOCH"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"roster_version": 9}, "ROSTER_MISMATCH"),
        ({"roster_hash": bytes(32)}, "ROSTER_MISMATCH"),
        ({"ring": "other"}, "NO_SUCH_RING"),
        ({"model": "other"}, "PLAN_MISMATCH"),
        ({"model_digest": "00"}, "PLAN_MISMATCH"),
        ({"context": 1}, "PLAN_MISMATCH"),
        ({"epoch": 0}, "BAD_EPOCH"),
        ({"max_rows": 0}, "BAD_EPOCH"),
        ({"max_rows": 257}, "BAD_EPOCH"),
        ({"prefill_chunk": 8193}, "BAD_EPOCH"),
        ({"prefill_chunk": 0}, "BAD_EPOCH"),
        ({"kv_budget": 0}, "BAD_EPOCH"),
        ({"kv_bits": 3}, "BAD_EPOCH"),
        ({"commit": "main"}, "BAD_EPOCH"),
    ],
)
def test_what_does_not_fit_the_roster_is_refused(cluster, changes: dict[str, Any], reason: str) -> None:
    party = cluster.party()
    _, roster = cluster.roster([party])
    with pytest.raises(SealringError) as raised:
        plan_epoch(prepare(roster, **changes), roster, party.id)
    assert raised.value.reason == reason


def test_an_epochs_limits_may_be_what_they_are_at_most_and_least(cluster) -> None:
    party = cluster.party()
    _, roster = cluster.roster([party])
    for changes in (
        {"epoch": 1, "max_rows": 1, "prefill_chunk": 1, "kv_budget": 1, "kv_bits": 0},
        {"max_rows": 256, "prefill_chunk": 8192, "kv_bits": 8, "commit": "c" * 40},
    ):
        plan = plan_epoch(prepare(roster, **changes), roster, party.id)
        assert {name: getattr(plan, name) for name in changes} == changes


def test_a_strategy_that_is_not_known_is_refused(cluster) -> None:
    party = cluster.party()
    _, roster = cluster.roster([party])
    ring = dataclasses.replace(roster.rings[0], strategy="tensor")
    with pytest.raises(SealringError) as raised:
        plan_epoch(prepare(roster), dataclasses.replace(roster, rings=(ring,)), party.id)
    assert raised.value.reason == "UNSUPPORTED_STRATEGY"


def test_a_member_outside_the_ring_has_no_plan(cluster) -> None:
    inside, outside = cluster.party(), cluster.party()
    _, roster = cluster.roster([inside], members=[inside, outside])
    with pytest.raises(SealringError) as raised:
        plan_epoch(prepare(roster), roster, outside.id)
    assert raised.value.reason == "NOT_IN_RING"


def test_an_mtp_head_guesses_only_where_tokens_are_guessed(cluster) -> None:
    parties = [cluster.party() for _ in range(2)]
    _, roster = cluster.roster(parties)
    asked = [prepare(roster, mtp=True, speculate=speculate) for speculate in (True, False)]
    assert [plan_epoch(one, roster, parties[1].id).mtp for one in asked] == [True, False]
