"""What a file for `--simulate` may hold, up to each bound, and what becomes of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from pydantic import ValidationError

from sealring.coordinator.planning.planner import SHORTEST_CHUNK
from sealring.coordinator.planning.simulation import SimulationFile, simulate
from sealring.mesh.ring import MAX_CONTEXT, MAX_LAYERS
from sealring.v1 import admin_pb2

FILE: dict[str, Any] = {
    "model": {"layers": 3, "layer_bytes": 10, "kv_bytes_per_token": 5, "handoff_bytes_per_token": 8},
    "machines": [{"name": "mac", "usable_gib": 2, "gb_per_s": 3, "rows": [[1, 1], [3, 2]]}],
    "links": [{"between": ["mac", "b"], "gbit_per_s": 8, "latency_us": 10}],
    "network": {"gbit_per_s": 1, "latency_us": 100},
}


def read(place: str = "", value: Any = None) -> SimulationFile:
    """With one thing changed, named by its path."""
    content = copy.deepcopy(FILE)
    if place:
        *path, last = place.split(".")
        inside: Any = content
        for step in path:
            inside = inside[int(step) if step.isdigit() else step]
        inside[last] = value
    return SimulationFile.model_validate_json(json.dumps(content))


MOST = 1 << 50


@pytest.mark.parametrize(
    ("place", "good", "bad"),
    [
        ("model.layers", [1, MAX_LAYERS], [0, MAX_LAYERS + 1, 3.0, "3", True]),
        ("model.layer_bytes", [0, MOST, [0, MOST]], [-1, MOST + 1, [-1], [1] * (MAX_LAYERS + 1)]),
        ("model.kv_bytes_per_token", [0, MOST, [1] * MAX_LAYERS], [-1, MOST + 1, [1] * (MAX_LAYERS + 1)]),
        ("model.kv_max_tokens", [[0, (1 << 32) - 1]], [[1 << 32], [-1], [1] * (MAX_LAYERS + 1)]),
        ("model.state_bytes", [[0, MOST]], [[MOST + 1], [1] * (MAX_LAYERS + 1)]),
        ("model.handoff_bytes_per_token", [0, MOST], [-1, MOST + 1]),
        ("model.embed_bytes", [0, MOST], [-1, MOST + 1]),
        ("model.head_bytes", [0, MOST], [-1, MOST + 1]),
        ("model.tied", [True], ["yes", 1]),
        ("model.max_context", [0, MAX_CONTEXT], [-1, MAX_CONTEXT + 1]),
        ("model.vocab_size", [0, 1 << 24], [-1, (1 << 24) + 1]),
        ("model.digest", ["of a profile"], []),
        ("machines.0.name", ["a", "A.b_c-9", "n" * 64], ["", "n" * 65, "a b"]),
        ("machines.0.usable_gib", [1e-6, 1e9], [0, 1.1e9]),
        ("machines.0.gb_per_s", [1e-6, 1e9], [0, 1.1e9]),
        (
            "machines.0.rows",
            [[], [[1, 1], [256, 1]], [[1, 1.0], [2, 1e6]]],
            [
                [[1, 1]],
                [[2, 1], [3, 1]],
                [[1, 2], [2, 2]],
                [[1, 1], [1, 1]],
                [[1, 1], [2, 0.9]],
                [[1, 1], [257, 2]],
            ],
        ),
        ("machines.0.metal", [True], ["yes", 1]),
        ("machines.0.layer_us", [0, 1e9], [-0.1, "1"]),
        ("machines.0.kv_gb_per_s", [0, 1e9], [-0.1]),
        ("machines.0.count", [1, 64], [0, 65, 1.0]),
        ("machines.0.other", [], [1]),
        ("machines", [FILE["machines"] * 64], [[], FILE["machines"] * 65]),
        ("links", [[], FILE["links"] * 256], [FILE["links"] * 257]),
        ("links.0.between", [["a", "b"], ["n"] * 64], [["a"], ["n"] * 65]),
        ("links.0.other", [], [1]),
        ("network", [None], [1]),
        ("network.latency_us", [0, 1e9], [-1]),
        ("other", [], [1]),
    ],
)
def test_each_figure_is_taken_up_to_its_bounds(place: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        read(place, value)
    for value in bad:
        with pytest.raises(ValidationError):
            read(place, value)


@pytest.mark.parametrize(("metal", "longer"), [(False, False), (True, True)])
def test_a_mac_is_planned_with_the_chunks_that_it_gains_by(metal: bool, longer: bool) -> None:
    content = FILE | {"machines": [FILE["machines"][0] | {"metal": metal}], "links": []}
    made = simulate(json.dumps(content).encode(), admin_pb2.DeploymentSpec(name="x", model="m"))
    assert (made.plan.spec.prefill_chunk > SHORTEST_CHUNK) == longer
