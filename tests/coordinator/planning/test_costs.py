"""The cost model of shapes: against what was measured, and against a simulation of steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringevents import EventRing

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.costs import Estimate, Group, Link, Model, Network, Shape, estimate
from sealring.coordinator.planning.speeds import Rate
from sealring.v1 import model_pb2

GIB = 1 << 30
TOLERANCE = 0.2
"""By how much the formulae and the simulation of steps may differ, of the simulation."""


def model(layers: int, layer: int, head: int, kv: int, state: int, context: int, **changes: Any) -> Model:
    parts = {
        ranks: model_pb2.ModelProfile(
            layers=layers,
            layer_bytes=[layer // ranks] * layers,
            kv_bytes_per_token=[kv // ranks] * layers,
            kv_max_tokens=[0] * layers,
            state_bytes=[0] * layers,
            embed_bytes=head,
            head_bytes=head,
            handoff_bytes_per_token=state,
            **changes,
        )
        for ranks in (1, 2, 4)
    }
    return Model(parts, context)


def machine(name: str, rate: Rate | None, memory: int = 139 * GIB) -> Candidate:
    return Candidate(name, name, memory, 10, rate=rate)


def of(made: Model, shape: Shape, network: Network, rows: int) -> Estimate:
    found = estimate(made, shape, network, rows)
    assert found is not None
    return found


# What one H200 did in one process (docs/performance/2026-11-21.md): 1 row of the two shapes at 185 and 68.1
# tokens/s give bytes a second and the time of a layer, 64 rows what a row adds, 4,096 tokens the caches.
H200 = {"8b": Rate(4.5e9 * 1000, 0.0146, 65e-6, 423e9), "70b": Rate(4.5e9 * 1000, 0.0075, 65e-6, 214e9)}
LAYER = {"8b": (436_207_616, 4096), "70b": (1_711_276_032, 8192)}
HEAD = 128_256 * 2
NCCL = Network(links={frozenset("ab"): Link(65e-6, 450e9)})
"""12.5 ms a step of 16 rows of mlx-lm's own two ranks (docs/performance/data/tensor.json), less what
computing takes, is 130 us a sum: two rounds."""


def h200(shape: str, context: int) -> Model:
    layer, hidden = LAYER[shape]
    return model(32, layer, HEAD * hidden, 4096, 2 * hidden, context)


def stages(shape: str, *layers: int) -> Shape:
    names = "abcd"
    return tuple(Group((machine(names[rank], H200[shape]),), one) for rank, one in enumerate(layers))


@pytest.mark.parametrize(
    ("shape", "split", "rows", "context", "measured"),
    [
        ("8b", (17, 15), 1, 128, 137),
        ("70b", (17, 15), 1, 128, 58.6),
        ("8b", (9, 8, 8, 7), 1, 128, 105),
        ("70b", (9, 8, 8, 7), 1, 128, 50.4),
        ("8b", (17, 15), 16, 128, 1751),
        ("70b", (17, 15), 16, 128, 824),
        ("8b", (17, 15), 64, 128, 6761),
        ("70b", (17, 15), 64, 128, 3043),
        ("70b", (9, 8, 8, 7), 128, 128, 5150),
        ("8b", (17, 15), 64, 8192, 1234),
        ("70b", (17, 15), 64, 8192, 615),
    ],
)
def test_pipelines_are_estimated_near_what_was_measured(
    shape: str, split: tuple[int, ...], rows: int, context: int, measured: float
) -> None:
    """From figures of one GPU alone; always too fast, because what a stage does besides is not in it."""
    found = of(h200(shape, context), stages(shape, *split), Network(Link(0, 1e12)), rows)
    rate = found.one_request if rows == 1 else found.full_batch
    assert measured * 0.98 <= rate <= measured * 1.3


def test_tensor_is_estimated_slower_than_the_pipeline_where_it_was() -> None:
    """2 x H200, 16 requests, steady tokens a second: 1,066 and 1,516 (docs/performance/data/tensor.json)."""
    made = h200("8b", 128)
    ranks = (Group(tuple(machine(name, H200["8b"]) for name in "ab"), 32),)
    tensor = of(made, ranks, NCCL, 16)
    pipeline = of(made, stages("8b", 16, 16), NCCL, 16)
    assert 1066 <= tensor.full_batch <= 1066 * 1.3
    assert 1.42 <= pipeline.full_batch / tensor.full_batch <= 1.42 * 1.3
    compute, sums, hops = tensor.step
    assert sums > compute > hops


rates = st.builds(
    Rate,
    bytes_per_second=st.floats(5e10, 5e12),
    row_share=st.floats(0, 1),
    layer_seconds=st.floats(0, 2e-4),
    kv_bytes_per_second=st.sampled_from([0.0, 4e10]),
)
wires = st.builds(Link, latency=st.floats(1e-6, 1e-3), bytes_per_second=st.floats(1e8, 1e11))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Model, Shape, Network, int]:
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=4))
    layers = [draw(st.integers(1, 6)) for _ in sizes]
    rows = draw(st.sampled_from([1, 2, 3, 5, 16, 64]))
    made = model(
        sum(layers),
        draw(st.integers(10**6, 10**9)),
        draw(st.integers(0, 10**9)),
        draw(st.sampled_from([0, 512, 4096])),
        draw(st.sampled_from([2048, 16384])),
        64,
        tied=draw(st.booleans()),
    )
    shape, links = [], {}
    for number, (size, count) in enumerate(zip(sizes, layers, strict=True)):
        machines = tuple(machine(f"{number}-{rank}", draw(rates)) for rank in range(size))
        within = draw(wires)
        links |= {
            frozenset((one.id, other.id)): within
            for one in machines
            for other in machines
            if one is not other
        }
        shape.append(Group(machines, count))
    return made, tuple(shape), Network(draw(wires), links), rows


@settings(max_examples=80, deadline=None, derandomize=True)
@given(clusters())
def test_formulae_and_simulated_steps_agree(cluster: tuple[Model, Shape, Network, int]) -> None:
    made, shape, network, rows = cluster
    found = of(made, shape, network, rows)
    assert found.rows == rows
    simulated = EventRing(made, shape, network, rows).tokens_per_second(64 * rows)
    assert found.full_batch == pytest.approx(simulated, rel=TOLERANCE)
    alone = EventRing(made, shape, network, 1).tokens_per_second(64)
    assert found.one_request == pytest.approx(alone, rel=TOLERANCE)
