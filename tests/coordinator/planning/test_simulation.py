"""What a file for `--simulate` may hold, up to each bound, and what becomes of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from pydantic import ValidationError

from sealring.coordinator.planning.costs import ASSUMED, Link
from sealring.coordinator.planning.simulation import (
    MAX_BYTES,
    SimulationFile,
    _machines,
    _network,
    _parts,
)
from sealring.coordinator.planning.speeds import Rate
from sealring.mesh.ring.limits import MAX_CONTEXT, MAX_LAYERS

FILE: dict[str, Any] = {
    "model": {"layers": 3, "layer_bytes": 10, "kv_bytes_per_token": 5, "handoff_bytes_per_token": 8},
    "machines": [{"name": "mac", "usable_gib": 2, "gb_per_s": 3, "row_share": 0.5}],
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
        ("model.digest", ["of a profile"], []),
        ("machines.0.name", ["a", "A.b_c-9", "n" * 64], ["", "n" * 65, "a b"]),
        ("machines.0.usable_gib", [1e-6, 1e9], [0, 1.1e9]),
        ("machines.0.gb_per_s", [1e-6, 1e9], [0, 1.1e9]),
        ("machines.0.row_share", [0, 1e9], [-0.1, 1.1e9]),
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


def test_what_is_left_out_is_nothing_and_the_rest_is_as_it_says() -> None:
    found = read()
    (mac,) = _machines(found)
    assert (mac.id, mac.memory_usable, mac.trust, mac.rate) == ("mac", 2 << 30, 1, Rate(3e9, 0.5, 0.0, 0.0))
    assert (found.model.tied, found.model.max_context) == (False, 0)
    assert (found.model.embed_bytes, found.model.head_bytes) == (0, 0)
    network = _network(found, {"mac", "b", "c"})
    assert network.between("b", "mac") == Link(10e-6, 1e9)
    assert network.between("b", "c") == Link(100e-6, 1.25e8)
    assert _network(read("network"), {"mac", "b"}).other is ASSUMED
    several = _machines(read("machines.0.count", 3))
    assert [one.name for one in several] == ["mac-1", "mac-2", "mac-3"]
    assert len(_machines(read("machines.0.count", 64))) == 64
    assert MAX_BYTES == 1 << 20


def test_ranks_hold_an_equal_part_of_each_layer_rounded_up() -> None:
    model = read("model.state_bytes", [3, 0, 9]).model
    model.kv_max_tokens, model.embed_bytes, model.head_bytes = [4, 0, 5], 6, 7
    parts = _parts(model)
    assert list(parts) == [1, 2, 4, 8]
    for ranks, layer, row, states in ((1, 10, 5, [3, 0, 9]), (4, 3, 2, [1, 0, 3])):
        part = parts[ranks]
        assert (part.layers, part.layer_bytes, part.kv_bytes_per_token) == (3, [layer] * 3, [row] * 3)
        assert (part.state_bytes, part.kv_max_tokens) == (states, [4, 0, 5])
        assert (part.embed_bytes, part.head_bytes, part.handoff_bytes_per_token) == (6, 7, 8)
    bare = _parts(read().model)[1]
    assert (bare.kv_max_tokens, bare.state_bytes) == ([0] * 3, [0] * 3)
