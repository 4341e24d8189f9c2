"""Plans: who serves, which layers, at what context; and refusals with the numbers."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfacts import member_with, ring_of

from sealring.coordinator.planning import arrangement
from sealring.coordinator.planning.apportion import apportion
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import MARKS, Demand, capacity, longest_chunk_in, with_draft
from sealring.coordinator.planning.links import Link, Network
from sealring.coordinator.planning.planner import CLEAR, memory_of, plan, with_ring
from sealring.coordinator.planning.speeds import Rate, Speeds
from sealring.gateway.scheduler import Ledger
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import (
    FailedPrecondition,
    InvalidInput,
    ModelError,
    ResourceExhausted,
)
from sealring.mesh.ring import DRAFT_MARKS
from sealring.node.engine import draft_bytes, kv_bytes, mark_bytes
from sealring.v1 import admin_pb2, model_pb2
from sealring.v1.membership_pb2 import EpochPrepared, RowsTime

GIB = 1 << 30
MIB = 1 << 20


def profile(layers: int = 9, *, layer: int = 100 * MIB, **changes: object) -> model_pb2.ModelProfile:
    values: dict[str, object] = {
        "model_type": "llama",
        "layers": layers,
        "layer_bytes": [layer] * layers,
        "embed_bytes": 50 * MIB,
        "head_bytes": 50 * MIB,
        "kv_bytes_per_token": [1024] * layers,
        "kv_max_tokens": [0] * layers,
        "state_bytes": [0] * layers,
        "max_context": 2048,
        "digest": "ab" * 32,
        "hidden_size": 64,
        "vocab_size": 0,
        "dtype": "float32",
    }
    return model_pb2.ModelProfile(**(values | changes))  # type: ignore[arg-type]


def member(number: int, memory: int, *, trust: int = 10, obstacle: str = "") -> Candidate:
    return Candidate(encode_base32(bytes([number]) * 32), f"node-{number}", memory, trust, obstacle)


def busy(number: int, memory: int, taken: int) -> Candidate:
    """A member of which another deployment's ring takes `taken` bytes."""
    return dataclasses.replace(member(number, memory), shares=("big-0",), taken=taken)


def spec(**changes: object) -> admin_pb2.DeploymentSpec:
    return admin_pb2.DeploymentSpec(**({"name": "demo", "model": "demo"} | changes))  # type: ignore[arg-type]


def ranges(made: admin_pb2.DeploymentPlan, ring: int = 0) -> list[tuple[int, int]]:
    return [(stage.first_layer, stage.end_layer) for stage in made.rings[ring].stages]


def names(made: admin_pb2.DeploymentPlan, ring: int = 0) -> list[str]:
    return [stage.member_name for stage in made.rings[ring].stages]


THREE = [member(number, 2 * GIB) for number in (1, 2, 3)]


def test_as_few_members_as_hold_the_model() -> None:
    made = plan(spec(), profile(), THREE)
    assert ranges(made) == [(0, 9)]
    assert made.spec.stages == 1
    assert made.spec.context == 2048
    assert made.spec.replicas == 1
    assert made.spec.max_rows == 46  # 1.8 GiB less 1000 MiB of weights, 18 MiB per row
    roomy = plan(spec(), profile(max_context=0), [member(1, 64 * GIB)]).spec
    assert (roomy.context, roomy.max_rows) == (4096, 64)
    assert plan(spec(context=9, stages=9), profile(max_context=9), [member(n, GIB) for n in range(9)])
    assert plan(spec(context=9999), profile(max_context=0), THREE).spec.context == 9999


def test_exactly_the_stages_asked_for() -> None:
    made = plan(spec(stages=3), profile(), THREE)
    assert ranges(made) == [(0, 3), (3, 6), (6, 9)]
    head, middle, tail = made.rings[0].stages
    assert (head.weight_bytes, middle.weight_bytes, tail.weight_bytes) == (350 * MIB, 300 * MIB, 350 * MIB)
    assert head.kv_bytes == 3 * 1024 * 2048
    assert made.rings[0].kv_budget == min(stage.kv_budget for stage in made.rings[0].stages)
    assert made.rings[0].ring == "demo-0"


def test_ranks_follow_measured_links_unless_the_operator_named_the_members() -> None:
    slow, fast = Link(2e-3, 5e6), Link(1e-4, 1e9)
    one, two, three = (each.id for each in THREE)
    links = {frozenset((one, two)): slow, frozenset((two, three)): fast, frozenset((one, three)): fast}
    known = Network(links=links)
    made = plan(spec(stages=3), profile(), THREE, known)
    assert names(made) == ["node-1", "node-3", "node-2"]
    assert any("in the order node-1, node-3, node-2, for their links" in why for why in made.reasons)
    assert names(plan(spec(stages=3), profile(), THREE)) == ["node-1", "node-2", "node-3"]
    named = plan(spec(stages=3, members=[one, two, three]), profile(), THREE, known)
    assert names(named) == ["node-1", "node-2", "node-3"]
    assert not any("for their links" in why for why in named.reasons)


def test_a_plan_says_why_it_is_so() -> None:
    def why(**changes: object) -> str:
        return "\n".join(plan(spec(**changes), profile(), THREE).reasons)

    assert "fits on one node: 1000.0 MiB of weights" in why()
    assert "--stages 3 spreads it over 3" in why()
    assert "memory for 46 sequences" in why()
    assert "memory for" not in why(max_rows=2)
    assert "2 nodes for each ring, as asked" in why(stages=2)
    assert "the split by hand fits" in why(split=[3, 6])
    assert "no tokens are guessed: a ring of one" in why(speculate=True, stages=1)
    assert "would change the answers of this model" in why(speculate=True, stages=2)
    able = plan(spec(speculate=True, stages=2), profile(trimmable=True), THREE)
    assert "guessed" not in "\n".join(able.reasons)
    few = [member(number, GIB // 2) for number in (1, 2, 3)]
    assert "3 nodes for each ring, for 2 would not hold it" in "\n".join(plan(spec(), profile(), few).reasons)
    long = plan(spec(), profile(max_context=1 << 20), THREE)
    assert long.spec.context < 1 << 20
    assert "for 1048576 do not fit" in "\n".join(long.reasons)


def test_a_slow_member_gets_fewer_layers_and_the_plan_says_so() -> None:
    """If all were measured with this model: never more layers than fit, and a split by hand as given."""
    speeds = Speeds()
    first = plan(spec(stages=3), profile(), THREE).rings[0].stages
    for stage, microseconds in zip(first, (10_000, 35_000, 10_000), strict=True):
        assert speeds.of(stage.member, "ab" * 32, "") is None
        speeds.note(stage, profile(), EpochPrepared(times=[RowsTime(rows=1, microseconds=microseconds)]))
    seen = [dataclasses.replace(one, rate=speeds.of(one.id, "ab" * 32, "")) for one in THREE]
    made = plan(spec(stages=3), profile(), seen)
    assert ranges(made) == [(0, 4), (4, 5), (5, 9)]
    assert "node-2 gets 1 layer, for it was seen to be 4.1 times slower" in "\n".join(made.reasons)
    assert ranges(plan(spec(stages=3), profile(), [*seen[:2], THREE[2]])) == [(0, 3), (3, 6), (6, 9)]
    assert ranges(plan(spec(split=[3, 3, 3]), profile(), seen)) == [(0, 3), (3, 6), (6, 9)]
    little = [dataclasses.replace(one, memory_usable=480 * MIB) for one in (seen[0], seen[2])]
    assert ranges(plan(spec(stages=3), profile(), [little[0], seen[1], little[1]])) == [
        (0, 3),
        (3, 6),
        (6, 9),
    ]
    even = [
        dataclasses.replace(one, rate=Rate(each)) for one, each in zip(THREE, (100, 51, 100), strict=True)
    ]
    assert ranges(plan(spec(stages=3), profile(), even)) == [(0, 3), (3, 6), (6, 9)]


def test_members_that_have_the_model_come_first() -> None:
    has = member(1, 2 * GIB)
    others = [dataclasses.replace(member(number, 64 * GIB), fetches=True) for number in (2, 3)]
    assert names(plan(spec(), profile(), [*others, has])) == ["node-1"]
    made = plan(spec(stages=2), profile(), [*others, has])
    assert names(made)[0] == "node-1"
    assert f"{names(made)[1]} first get the model" in "\n".join(made.reasons)


def test_layers_follow_memory() -> None:
    members = [member(1, 64 * GIB), member(2, 192 * GIB)]
    made = plan(spec(stages=2), profile(32, layer=4 * GIB, embed_bytes=0, head_bytes=0), members)
    assert names(made) == ["node-1", "node-2"]
    assert ranges(made) == [(0, 8), (8, 32)]


def test_ranks_follow_the_names_or_the_operators_order() -> None:
    members = [member(number, GIB + number) for number in (10, 9, 2)]
    assert names(plan(spec(stages=3), profile(), members)) == ["node-2", "node-9", "node-10"]
    chosen = [members[1].id, members[0].id, members[2].id]
    assert names(plan(spec(stages=3, members=chosen), profile(), members)) == ["node-9", "node-10", "node-2"]
    assert names(plan(spec(split=[3, 3, 3]), profile(), members)) == ["node-2", "node-9", "node-10"]


def test_the_strongest_are_chosen_whatever_their_names() -> None:
    members = [member(number, number * GIB) for number in (1, 2, 3, 4)]
    assert names(plan(spec(stages=2), profile(), members)) == ["node-3", "node-4"]


def test_split_by_hand_in_the_order_of_the_members() -> None:
    chosen = [THREE[2].id, THREE[0].id]
    made = plan(spec(split=[7, 2], members=chosen), profile(), THREE)
    assert names(made) == ["node-3", "node-1"]
    assert ranges(made) == [(0, 7), (7, 9)]
    assert made.spec.stages == 0


def test_split_without_members_gives_the_heaviest_stage_to_the_strongest() -> None:
    members = [member(1, 4 * GIB), member(2, 1 * GIB)]
    assert names(plan(spec(split=[2, 7]), profile(layer=125 * MIB), members)) == ["node-2", "node-1"]


def test_layers_at_a_border_are_held_twice_where_prompts_are_cut_otherwise() -> None:
    members = [member(number, 4 * GIB) for number in (1, 2)]
    one, two = (plan(spec(split=[3, 6], prompt_split=cut), profile(), members) for cut in ([], [7, 2]))
    plain, both = one.rings[0].stages, two.rings[0].stages
    assert [(each.prompt_first_layer, each.prompt_end_layer) for each in plain] == [(0, 0), (0, 0)]
    assert [(each.prompt_first_layer, each.prompt_end_layer) for each in both] == [(0, 7), (7, 9)]
    assert ranges(two) == ranges(one) == [(0, 3), (3, 9)]
    more = 4 * profile().layer_bytes[0]
    assert [each.weight_bytes for each in both] == [plain[0].weight_bytes + more, plain[1].weight_bytes]
    assert 3 * both[0].kv_bytes == 7 * plain[0].kv_bytes
    assert both[1].kv_bytes == plain[1].kv_bytes
    assert one.plan_hash != two.plan_hash
    small = [member(1, 700 * MIB), member(2, 4 * GIB)]
    assert plan(spec(split=[3, 6]), profile(), small).rings
    with pytest.raises(ResourceExhausted) as caught:
        plan(spec(split=[3, 6], prompt_split=[8, 1], members=[one.id for one in small]), profile(), small)
    assert caught.value.metadata["rank"] == "0"


def test_replicas_are_disjoint_and_alike() -> None:
    members = [member(number, number * GIB) for number in (1, 2, 3, 4)]
    made = plan(spec(stages=2, replicas=2), profile(), members)
    assert sorted(names(made, 0)) == ["node-1", "node-4"]
    assert sorted(names(made, 1)) == ["node-2", "node-3"]
    assert [ring.ring for ring in made.rings] == ["demo-0", "demo-1"]


def test_a_context_that_is_not_asked_for_shrinks_to_what_fits() -> None:
    made = plan(spec(), profile(max_context=1 << 20), [member(1, 2 * GIB)])
    rows = capacity(2 * GIB) - 1000 * MIB
    assert made.spec.context == rows // (9 * 1024) * 16 // 17 // 256 * 256, "with the room of a long cache"
    assert made.spec.max_rows == 1


def test_one_ring_of_a_plan_is_replaced_and_keeps_its_name() -> None:
    four = [*THREE, member(4, 2 * GIB)]
    made = plan(spec(stages=2, replicas=2), profile(), four)
    other = plan(spec(stages=3), profile(), THREE).rings[0]
    changed = with_ring(made, "demo-1", other)
    assert [ring.ring for ring in changed.rings] == ["demo-0", "demo-1"]
    assert changed.rings[0] == made.rings[0]
    assert changed.rings[1].stages == other.stages
    assert (changed.spec, changed.profile, changed.reasons) == (made.spec, made.profile, made.reasons)
    assert changed.plan_hash not in ("", made.plan_hash)
    assert with_ring(made, "demo-1", made.rings[1]) == made


def test_the_same_input_has_the_same_hash_and_another_split_another() -> None:
    first = plan(spec(stages=3), profile(), THREE)
    assert first.plan_hash == plan(spec(stages=3), profile(), list(reversed(THREE))).plan_hash
    assert first.plan_hash != plan(spec(split=[2, 3, 4]), profile(), THREE).plan_hash
    assert len(first.plan_hash) == 64


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": "a b"}, "name"),
        ({"name": ""}, "name"),
        ({"context": 4096}, "context"),
        ({"stages": 10}, "stages"),
        ({"split": [4, 4]}, "split"),
    ],
)
def test_bad_specifications_name_the_field(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(spec(**changes), profile(), THREE)
    assert caught.value.metadata["param"] == param
    with pytest.raises(ModelError):
        plan(spec(), profile(layers=0), THREE)


def test_quantized_caches_leave_room_for_more_rows() -> None:
    sizes = {0: 1024, 8: 576, 4: 320}
    measured = profile(
        quantized=[
            model_pb2.QuantizedCaches(bits=bits, kv_bytes_per_token=[size] * 9)
            for bits, size in sizes.items()
            if bits
        ]
    )
    rows, hashes = {}, set()
    for bits, size in sizes.items():
        made = plan(spec(kv_bits=bits, max_rows=3), measured, THREE)
        assert made.spec.kv_bits == bits
        assert sum(stage.kv_bytes for stage in made.rings[0].stages) == size * 9 * 2048
        rows[bits] = plan(spec(kv_bits=bits), measured, [member(1, 1200 * MIB)]).spec.max_rows
        hashes.add(made.plan_hash)
    assert rows[0] < rows[8] < rows[4]
    assert len(hashes) == 3


def test_too_few_nodes() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        plan(spec(stages=4), profile(), THREE)
    assert (caught.value.metadata["needed"], caught.value.metadata["available"]) == ("4", "3")
    with pytest.raises(FailedPrecondition) as caught:
        plan(spec(replicas=4), profile(), THREE)
    assert (caught.value.metadata["needed"], caught.value.metadata["available"]) == ("4", "3")
    assert len(plan(spec(replicas=3), profile(), THREE).rings) == 3
    two = spec(strategy="tensor", clear_links=True, stages=2)
    with pytest.raises(FailedPrecondition) as caught:
        plan(two, profile(), THREE[:1])
    assert (caught.value.metadata["needed"], caught.value.metadata["available"]) == ("2", "1")
    made = plan(two, profile(), THREE[:2])
    assert [ranges(made), made.rings[0].stages[1].weight_bytes] == [[(0, 9), (0, 9)], 1000 * MIB]
    assert [stage.rank for stage in made.rings[0].stages] == [0, 1]
    assert made.reasons[0] == CLEAR


def test_a_split_by_hand_needs_a_member_for_each_stage_of_each_replica() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        plan(spec(split=[3, 6], replicas=2), profile(), THREE)
    assert caught.value.reason == "NOT_ENOUGH_NODES"
    assert len(plan(spec(split=[3, 6], replicas=2), profile(), [*THREE, member(4, 2 * GIB)]).rings) == 2


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ResourceExhausted) as caught:
        plan(spec(), profile(layer=GIB), THREE)
    error = caught.value
    assert error.reason == "DOES_NOT_FIT"
    assert int(error.metadata["needed_bytes"]) == 9 * GIB + 100 * MIB + 9 * 1024 * 2048
    assert int(error.metadata["available_bytes"]) == 3 * capacity(2 * GIB)
    assert "9.1 GiB" in error.message
    assert "3 nodes have 5.4 GiB" in error.message
    with pytest.raises(ResourceExhausted) as caught:
        plan(spec(split=[1, 8]), profile(layer=300 * MIB), THREE)
    assert caught.value.metadata["rank"] == "1"


def test_few_orders_are_tried_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-two members have 992 pairs of ends, for each number of members and each context looked at."""
    tried = []

    def counting(*arguments: Any) -> list[int] | None:
        tried.append(arguments)
        return apportion(*arguments)

    monkeypatch.setattr(arrangement, "apportion", counting)
    members = [member(number, 16 * GIB + number * MIB) for number in range(32)]
    alike = profile(80, layer=7 * GIB)
    mixed = profile(80, layer_bytes=[10 * GIB if number % 2 else GIB for number in range(80)])
    for model, most in ((alike, 0), (mixed, 128)):
        tried.clear()
        with pytest.raises(ResourceExhausted):
            plan(spec(stages=32, context=2048), model, members)
        contexts = 4  # the one asked for, and halving the way to the largest that fits
        assert len(tried) <= contexts * most


def test_a_context_that_would_fit_is_told() -> None:
    with pytest.raises(ResourceExhausted) as caught:
        plan(spec(context=1 << 20), profile(max_context=1 << 20), [member(1, 2 * GIB)])
    largest = int(caught.value.metadata["largest_context"])
    assert str(largest) in caught.value.hint
    assert plan(spec(context=largest), profile(max_context=1 << 20), [member(1, 2 * GIB)])


@settings(max_examples=200)
@given(
    layers=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    memories=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    embedding=st.integers(0, 10),
    head=st.integers(0, 10),
    tied=st.booleans(),
    context=st.integers(1, 4),
    vocabulary=st.integers(0, 1),
)
def test_no_stage_exceeds_its_member_and_a_refusal_means_nothing_fits(
    layers: list[int],
    memories: list[int],
    embedding: int,
    head: int,
    tied: bool,
    context: int,
    vocabulary: int,
) -> None:
    model = profile(
        len(layers),
        layer_bytes=layers,
        embed_bytes=embedding,
        head_bytes=head,
        tied=tied,
        kv_bytes_per_token=[1] * len(layers),
        vocab_size=vocabulary,
    )
    members = [member(number, memory) for number, memory in enumerate(memories, 1)]
    demand = Demand.of(model, context)
    smallest = smallest_ring(demand, [capacity(memory) for memory in memories])
    if smallest is None:
        with pytest.raises(ResourceExhausted, match="needs"):
            plan(spec(context=context), model, members)
        return
    made = plan(spec(context=context), model, members)
    for stage in made.rings[0].stages:
        assert stage.end_layer > stage.first_layer
        assert stage.kv_bytes <= stage.kv_budget
        assert memory_of(stage) <= capacity(stage.memory_usable)
    assert made.rings[0].stages[-1].end_layer == len(layers)
    assert smallest == len(made.rings[0].stages)


def smallest_ring(demand: Demand, capacities: list[int]) -> int | None:
    """By brute force: the fewest members that hold the model in any order with any cut."""
    layers = demand.per_layer
    for count in range(1, min(len(capacities), len(layers)) + 1):
        extras = demand.extras(count)
        for order in permutations(capacities, count):
            for cuts in combinations(range(1, len(layers)), count - 1):
                bounds = pairwise([0, *cuts, len(layers)])
                if all(sum(layers[a:b]) + extras[r] <= order[r] for r, (a, b) in enumerate(bounds)):
                    return count
    return None


def test_a_context_that_does_not_fit_a_split_by_hand_is_refused_and_not_lowered() -> None:
    tight = profile(layer=125 * MIB, kv_bytes_per_token=[128 * 1024] * 9)
    largest = plan(spec(split=[3, 3, 3]), tight, [member(1, GIB), *THREE[1:]]).spec.context
    assert 0 < largest < 2048
    with pytest.raises(ResourceExhausted) as caught:
        plan(spec(split=[3, 3, 3], context=2048), tight, [member(1, GIB), *THREE[1:]])
    assert caught.value.reason == "DOES_NOT_FIT"
    assert caught.value.metadata["param"] == "split"


def test_nodes_that_serve_another_ring_are_used_where_the_free_ones_do_not_hold_the_model() -> None:
    large = busy(1, 8 * GIB, 4 * GIB)
    for free, chosen in ((2 * GIB, "node-2"), (512 * MIB, "node-1")):
        made = plan(spec(), profile(), [large, member(2, free)])
        (stage,) = made.rings[0].stages
        assert stage.member_name == chosen
        shared = [one for one in made.reasons if "big-0" in one]
        assert bool(shared) == (chosen == "node-1")
    assert shared == ["node-1 also serves big-0, and has 3.2 GiB left: the free nodes do not hold it"]
    by_hand = plan(spec(split=[5, 4]), profile(), [large, member(2, GIB), member(3, GIB)])
    assert {one.member_name for one in by_hand.rings[0].stages} == {"node-2", "node-3"}
    by_hand = plan(spec(split=[5, 4]), profile(), [large, member(2, GIB)])
    assert len(by_hand.rings[0].stages) == 2
    small = [member(2, 640 * MIB), member(3, 640 * MIB)]
    assert names(plan(spec(), profile(), [large, *small])) == ["node-2", "node-3"], "though one would do"
    named = plan(spec(members=[large.id]), profile(), [large, member(2, 2 * GIB)])
    assert named.reasons[-1].endswith("3.2 GiB left: as asked")


@pytest.mark.parametrize(
    ("free", "context", "chosen"),
    [
        (8 * GIB, 0, ["node-3", "node-4"]),
        (1152 * MIB, 0, ["node-1", "node-2"]),
        (GIB, 64, ["node-1", "node-2"]),
    ],
)
def test_a_tensor_ring_shares_nodes_where_the_free_ones_hold_less_of_it(
    free: int, context: int, chosen: list[str]
) -> None:
    """Less of its context, or nothing."""
    nodes = [busy(1, 8 * GIB, 4 * GIB), busy(2, 8 * GIB, 4 * GIB), member(3, free), member(4, free)]
    asked = spec(strategy="tensor", stages=2, clear_links=True, context=context)
    made = plan(asked, profile(kv_bytes_per_token=[16 * 1024] * 9), nodes)
    assert names(made) == chosen
    assert made.spec.context == (context or 2048)


def test_a_tensor_ring_takes_nodes_that_have_the_model_where_these_hold_it() -> None:
    """And says who gets it first where they do not, or hold less of its context."""
    small, large = [member(1, 2 * GIB), member(2, 2 * GIB)], [member(3, 8 * GIB), member(4, 8 * GIB)]
    nodes = [*small, *(dataclasses.replace(one, fetches=True) for one in large)]
    asked = spec(strategy="tensor", stages=2, clear_links=True)
    made = plan(asked, profile(), nodes)
    assert names(made) == ["node-1", "node-2"]
    assert "first get the model" not in "\n".join(made.reasons)
    made = plan(asked, profile(max_context=1 << 20), nodes)
    assert names(made) == ["node-3", "node-4"]
    assert "node-3, node-4 first get the model" in "\n".join(made.reasons)
    taken = [dataclasses.replace(one, shares=("big-0",), taken=MIB) for one in small]
    assert names(plan(asked, profile(), [*taken, *nodes[2:]])) == ["node-3", "node-4"], "free ones first"


def test_a_plan_says_what_its_rows_leave_to_others() -> None:
    """And what a smaller number would leave, where they take most of it."""
    tight = plan(spec(), profile(), [member(1, 2 * GIB)])
    assert (
        "memory for 46 sequences of that length at once, which leaves 0 B of node-1 to other deployments"
        "; --max-rows 11 would leave 641.6 MiB"
    ) in tight.reasons
    roomy = plan(spec(), profile(), [member(1, 64 * GIB)])
    assert "to other deployments" in "\n".join(roomy.reasons)
    assert "--max-rows" not in "\n".join(roomy.reasons)
    assert "to other deployments" not in "\n".join(plan(spec(max_rows=2), profile(), THREE).reasons)


def test_a_ring_is_granted_what_its_rows_may_take_and_leaves_the_rest() -> None:
    whole, granted = (
        plan(spec(max_rows=rows), profile(), [member(1, 8 * GIB)]).rings[0].stages[0] for rows in (0, 4)
    )
    assert whole.kv_budget > 64 * whole.kv_bytes
    assert granted.kv_budget == 4 * 9 * 1024 * (2048 + 512)
    tight = plan(spec(), profile(), [member(1, 2 * GIB)]).rings[0].stages[0]
    assert tight.weight_bytes + tight.kv_budget == capacity(2 * GIB), "rows take all that there is"


@pytest.mark.parametrize("window", [0, 512, 1024, 1279, 2048])
@pytest.mark.parametrize("state", [0, MIB])
def test_what_a_ring_is_granted_holds_a_row_of_its_whole_context(window: int, state: int) -> None:
    """By the engine's figures, in the gateway's book, with the row's marks, and any drafts."""
    windows, states, handoff = [window] * 6, [0, 0, state] * 2, 8192
    sizes = {"kv_max_tokens": windows, "state_bytes": states, "handoff_bytes_per_token": handoff}
    model = profile(6, **sizes, trimmable=True)
    measured = sizes | {"kv_bytes_per_token": [1024] * 6}
    asked = {"context": 1024, "prefill_chunk": 128, "max_rows": 1, "split": [3, 3]}
    for speculate in (False, True):
        made = plan(spec(**asked, speculate=speculate), model, [member(1, 8 * GIB), member(2, 8 * GIB)])
        for stage in made.rings[0].stages:
            layers = stage.first_layer, stage.end_layer
            drafts = draft_bytes(measured, *layers, 1024, 2) if speculate else 0
            assert (drafts > 0) == (speculate and bool(state or 0 < window < 1024))
            per_token, per_row = kv_bytes(measured, *layers, 1024, 128)
            marks = MARKS * mark_bytes(measured, *layers, 1024)
            assert stage.kv_budget - drafts >= per_token * 1024 + per_row + marks
            alone = member_with(stage.kv_budget - drafts, token=per_token, row=per_row)
            assert Ledger(ring_of(alone, rows=1, chunk=128)).capacity >= 1024


def test_a_tail_that_samples_for_many_rows_gets_fewer_layers() -> None:
    """Its logits would else not fit beside its layers."""
    model = profile(vocab_size=150_000)
    two = [member(number, 850 * MIB) for number in (1, 2)]
    for rows, cut, logits in ((1, 5, 9 * 4 * 150_000), (64, 6, 64 * 9 * 4 * 150_000)):
        made = plan(spec(stages=2, max_rows=rows, context=64), model, two)
        head, tail = made.rings[0].stages
        assert (ranges(made), head.logits_bytes, tail.logits_bytes) == ([(0, cut), (cut, 9)], 0, logits)
        assert all(memory_of(stage) <= capacity(850 * MIB) for stage in (head, tail))
    with pytest.raises(ResourceExhausted, match="of logits"):
        plan(spec(stages=2, max_rows=256, context=64), model, two)
    fewer = plan(spec(), model, [member(1, 2 * GIB)])
    assert 1 < fewer.spec.max_rows < plan(spec(), profile(), [member(1, 2 * GIB)]).spec.max_rows
    assert memory_of(fewer.rings[0].stages[0]) <= capacity(2 * GIB)


def test_who_takes_the_memory_that_is_missing_is_told() -> None:
    with pytest.raises(ResourceExhausted) as caught:
        plan(spec(), profile(), [busy(1, 4 * GIB, 3 * GIB)])
    assert "1 node has 614.4 MiB to give" in caught.value.message
    assert "big-0 would leave more with a lower --max-rows" in caught.value.hint
    with pytest.raises(FailedPrecondition, match="big-0 may take all of its memory"):
        plan(spec(), profile(), [busy(1, 4 * GIB, 4 * GIB)])


def gains(number: int, memory: int, longest_chunk: int) -> Candidate:
    return dataclasses.replace(member(number, memory), longest_chunk=longest_chunk)


def test_chunks_are_as_long_as_every_member_of_the_ring_gains_by() -> None:
    mac, older = gains(1, 8 * GIB, 2048), member(2, 6 * GIB)
    assert plan(spec(), profile(), [mac, older]).spec.prefill_chunk == 2048, "one of them holds the model"
    assert plan(spec(stages=2), profile(), [mac, older]).spec.prefill_chunk == 256, "it does not say"
    assert plan(spec(stages=2), profile(), [mac, gains(2, 6 * GIB, 512)]).spec.prefill_chunk == 512
    assert plan(spec(stages=2, prefill_chunk=300), profile(), [mac, older]).spec.prefill_chunk == 300


def test_a_chunk_fits_into_the_memory_that_no_plan_touches() -> None:
    """Half of a tenth, for what 64 stage states of each token take, and scores of quantized caches."""
    wide = profile(handoff_bytes_per_token=16 << 10)
    assert plan(spec(), wide, [gains(1, 128 * GIB, 2048)]).spec.prefill_chunk == 2048
    assert plan(spec(), wide, [gains(1, 16 * GIB, 2048)]).spec.prefill_chunk == 512
    assert plan(spec(), wide, [gains(1, 4 * GIB, 2048)]).spec.prefill_chunk == 256
    assert longest_chunk_in(128 * GIB, wide, 2048, 0) > longest_chunk_in(128 * GIB, wide, 131_072, 8)


def test_windows_hold_the_chunk_that_is_planned() -> None:
    """A first arrangement is for longer chunks than one of its members has."""
    windows = profile(kv_max_tokens=[256] * len(profile().layer_bytes))
    short, long = (
        plan(
            spec(stages=2, max_rows=1, prefill_chunk=chunk), windows, [member(1, 8 * GIB), member(2, 8 * GIB)]
        )
        for chunk in (512, 2048)
    )
    found = plan(spec(stages=2, max_rows=1), windows, [gains(1, 8 * GIB, 2048), gains(2, 8 * GIB, 512)])
    kv_bytes = [[stage.kv_bytes for stage in made.rings[0].stages] for made in (short, long, found)]
    assert kv_bytes[2] == kv_bytes[0] != kv_bytes[1]


def test_a_context_is_not_refused_for_longer_chunks() -> None:
    """Without a context asked for, longer chunks take a sixteenth of it at most."""
    windows = profile(
        kv_bytes_per_token=[1 << 14] * 9, kv_max_tokens=[1024] * 4 + [0] * 5, max_context=1 << 17
    )
    short = plan(spec(max_rows=1, prefill_chunk=256), windows, [gains(1, 3 * GIB, 2048)]).spec
    found = plan(spec(max_rows=1), windows, [gains(1, 3 * GIB, 2048)]).spec
    asked = plan(spec(max_rows=1, context=short.context), windows, [gains(1, 3 * GIB, 2048)]).spec
    assert 15 * short.context <= 16 * found.context < 16 * short.context
    assert asked.context == short.context < windows.max_context
    assert 256 <= asked.prefill_chunk < found.prefill_chunk < 2048


def drafted(small: model_pb2.ModelProfile, **changes: object) -> model_pb2.ModelProfile:
    """A model whose drafts can be taken back, with the draft model `small`."""
    made = profile(trimmable=True, **changes)
    with_draft(made, "small", small)
    return made


def held(stage: admin_pb2.StagePlan) -> dict[str, int]:
    """Bytes of what a stage holds besides layers, by name."""
    return {one.name: one.bytes for one in stage.residents}


def test_the_head_has_fewer_layers_by_as_much_as_a_draft_model_takes() -> None:
    small = profile(layers=6, digest="cd" * 32, quantized=[{"bits": 8, "kv_bytes_per_token": [300] * 6}])
    large = drafted(small)
    asked = spec(stages=3, draft="small", kv_bits=0)
    plain, made = plan(spec(stages=3), profile(), THREE), plan(asked, large, THREE)
    assert [end - first for first, end in ranges(plain)] == [3, 3, 3]
    assert ranges(made)[0][1] < 3
    head, *others = made.rings[0].stages
    assert held(head)["draft"] > 700 * MIB
    assert not any(map(held, others))
    for stage in made.rings[0].stages:
        assert memory_of(stage) <= capacity(2 * GIB)
    assert made.spec.speculate
    assert made.plan_hash != plan(spec(stages=3, speculate=True), profile(), THREE).plan_hash


@pytest.mark.parametrize("kept", [{"kv_max_tokens": [512] * 6}, {"state_bytes": [MIB] * 6}])
def test_windows_and_states_of_a_draft_model_count_for_each_of_its_marks(kept: dict[str, list[int]]) -> None:
    small = profile(layers=6, digest="cd" * 32, **kept)
    made = plan(spec(stages=3, draft="small", prefill_chunk=256), drafted(small), THREE)
    alone = 6 * 100 * MIB + 2 * 50 * MIB
    each = 6 * (1024 * (512 + 256) if "kv_max_tokens" in kept else MIB)
    keys = 6 * 1024 * (2048 + 256) if "state_bytes" in kept else 0
    assert held(made.rings[0].stages[0]) == {"draft": alone + keys + (1 + DRAFT_MARKS) * each}


def reader(**changes: Any) -> model_pb2.ModelProfile:
    """The profile of a drafter that reads hidden states."""
    held = {
        "name": "drafter",
        "at": "RING_END_TAIL",
        "bytes": 700 * MIB,
        "bytes_per_token": 10,
        "guesses": True,
    }
    return model_pb2.ModelProfile(**{"digest": "cd" * 32, "taps": [0, 2], "residents": [held]} | changes)


def test_the_tail_has_fewer_layers_by_as_much_as_a_drafter_takes() -> None:
    made = plan(spec(stages=3, draft="small"), drafted(reader()), THREE)
    *others, tail = made.rings[0].stages
    assert held(tail) == {"drafter": 700 * MIB + 10 * made.spec.context}
    assert not any(map(held, others))
    assert tail.end_layer - tail.first_layer < 3
    assert [one.model for one in tail.residents] == ["small"]


@pytest.mark.parametrize(
    "bad", [{"taps": [2, 0]}, {"taps": [0, 900]}, {"residents": []}, {"digest": "x"}, {"taps": range(17)}]
)
def test_what_a_node_says_of_a_drafter_is_bounded(bad: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as refused:
        plan(spec(stages=3, draft="small"), _with(reader(**bad)), THREE)
    assert refused.value.reason == "BAD_PROFILE"


def _with(drafter: model_pb2.ModelProfile) -> model_pb2.ModelProfile:
    made = profile(trimmable=True)
    made.draft.CopyFrom(drafter)
    return made


@pytest.mark.parametrize("reads", [False, True])
def test_a_ring_of_one_has_no_draft_model(reads: bool) -> None:
    large = profile(layers=2)
    if reads:
        with_draft(large, "small", reader(taps=[0]))
    made = plan(spec(draft="small"), large if reads else drafted(large), THREE)
    assert [held(stage) for stage in made.rings[0].stages] == [{}]
    assert any("a ring of one node" in reason for reason in made.reasons)


def seeing(layers: int = 0, **changes: object) -> model_pb2.ModelProfile:
    """A model with a vision tower, whose images need the first `layers` at the head."""
    tower = {"name": "vision", "at": "RING_END_HEAD", "bytes": 700 * MIB, "layers": layers, "does": "it sees"}
    return profile(residents=[tower], **changes)


def test_the_head_has_fewer_layers_by_as_much_as_a_vision_tower_takes() -> None:
    made = plan(spec(stages=3), seeing(), THREE)
    head, *others = made.rings[0].stages
    assert held(head) == {"vision": 700 * MIB}
    assert not any(map(held, others))
    assert head.end_layer < min(stage.end_layer - stage.first_layer for stage in others)
    assert any(line.startswith("it sees at node-") and "700.0 MiB" in line for line in made.reasons)
    assert memory_of(head) <= capacity(head.memory_usable)


def test_the_layers_to_which_an_image_adds_rows_are_the_heads() -> None:
    deep = seeing(3)
    assert ranges(plan(spec(stages=3), seeing(), THREE))[0] == (0, 2)
    assert ranges(plan(spec(stages=3), deep, THREE))[0] == (0, 3)
    assert ranges(plan(spec(split=[3, 6]), deep, THREE))[0] == (0, 3)
    many = [member(number, 2 * GIB) for number in range(1, 9)]
    assert ranges(plan(spec(stages=7), deep, many)) == [(0, 3), *((end - 1, end) for end in range(4, 10))]
    small = [member(1, 1100 * MIB), member(2, 1100 * MIB), member(3, 8 * GIB)]
    assert (
        names(plan(spec(stages=3), deep, small))[0] == "node-3"
    )  # alone it has room for three and the tower
    for asked, param in ((spec(stages=8), "stages"), (spec(split=[2, 7]), "split")):
        with pytest.raises(InvalidInput, match="first 3") as caught:
            plan(asked, deep, many)
        assert caught.value.metadata["param"] == param
    with pytest.raises(ResourceExhausted, match="vision needs the first 3 layers at one node"):
        plan(spec(stages=3), deep, [member(number, 1100 * MIB) for number in (1, 2, 3)])
    blind = plan(spec(strategy="tensor", clear_links=True, stages=2), deep, THREE)
    assert not any(map(held, blind.rings[0].stages))


@pytest.mark.parametrize(("at", "place"), [("RING_END_HEAD", 0), ("RING_END_TAIL", 2)])
def test_a_resident_that_planning_has_no_word_for_is_placed_counted_and_told(at: str, place: int) -> None:
    table = {"name": "table", "at": at, "bytes": 300 * MIB, "bytes_per_token": 10, "does": "a table looks up"}
    made = plan(spec(stages=3), profile(residents=[table]), THREE)
    stages = made.rings[0].stages
    assert [held(stage) for stage in stages] == [
        {"table": 300 * MIB + 10 * 2048} if rank == place else {} for rank in range(3)
    ]
    assert all(memory_of(stage) <= capacity(2 * GIB) for stage in stages)
    assert any(line.startswith(f"a table looks up at node-{place + 1}, with 300") for line in made.reasons)
    assert held(plan(spec(), profile(residents=[table]), THREE).rings[0].stages[0]).keys() == {"table"}


def test_a_resident_without_bytes_only_holds_layers_together() -> None:
    reading = {"name": "layers", "at": "RING_END_HEAD", "layers": 4, "does": "the first layers read tokens"}
    made = plan(spec(stages=3), profile(residents=[reading]), THREE)
    assert ranges(made)[0] == (0, 4)
    assert "the first layers read tokens at node-1" in made.reasons
    apart = plan(spec(strategy="tensor", clear_links=True, stages=2), profile(residents=[reading]), THREE)
    assert not any("read tokens" in line for line in apart.reasons)


def test_a_plan_says_why_images_are_refused() -> None:
    made = plan(spec(), profile(not_seeing="nobody has compared it"), THREE)
    assert "prompts with images are refused: nobody has compared it" in made.reasons
    assert not any("images" in reason for reason in plan(spec(), profile(), THREE).reasons)


def test_the_largest_image_fits_into_a_chunk_where_members_have_the_memory() -> None:
    large = seeing(image_tokens=2900)
    wide = seeing(image_tokens=2900, handoff_bytes_per_token=16 << 10)
    members = [member(1, 16 * GIB), gains(2, 16 * GIB, 2048)]
    assert plan(spec(stages=2), large, members).spec.prefill_chunk == 2900
    for asked, model, chunk in (
        (spec(stages=2), wide, 512),
        (spec(stages=2, prefill_chunk=300), large, 300),
    ):
        made = plan(asked, model, members)
        assert made.spec.prefill_chunk == chunk
        assert any(f"images of more than {chunk} tokens are made smaller" in line for line in made.reasons)


def test_a_tensor_ring_has_no_vision_tower_and_says_so() -> None:
    large = seeing(image_tokens=2900)
    made = plan(spec(strategy="tensor", clear_links=True, stages=2), large, THREE)
    assert made.spec.prefill_chunk == 256
    assert not any(held(stage) for ring in made.rings for stage in ring.stages)
    assert any("it sees in pipelines alone" in line for line in made.reasons)


def test_the_tail_has_fewer_layers_by_as_much_as_an_mtp_head_takes() -> None:
    """It is counted if tokens are guessed and no draft model does it."""
    head = {"name": "mtp", "at": "RING_END_TAIL", "guesses": True}
    head |= {"bytes": 700 * MIB, "bytes_per_token": 1024}
    able = profile(residents=[head], trimmable=True)
    *others, tail = plan(spec(stages=3, speculate=True), able, THREE).rings[0].stages
    assert held(tail) == {"mtp": 700 * MIB + 1024 * 2048}
    assert not any(map(held, others))
    assert tail.end_layer - tail.first_layer < others[0].end_layer - others[0].first_layer
    small = profile(layers=2)
    unused = [
        plan(spec(stages=3), able, THREE),
        plan(spec(stages=3, draft="small"), drafted(small, residents=[head]), THREE),
        plan(spec(stages=1, speculate=True), able, THREE),
        plan(spec(stages=3, speculate=True), profile(residents=[head]), THREE),
    ]
    assert not any(held(made.rings[0].stages[-1]) for made in unused)
