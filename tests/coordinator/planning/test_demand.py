"""The memory that a model needs, to the byte, and the bounds of profiles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealring.coordinator.planning.demand import (
    Demand,
    capacity,
    check_profile,
    kv_bytes_per_token,
    read_bytes,
)
from sealring.mesh.errors import ModelError
from sealring.mesh.ring import MAX_CONTEXT, MAX_LAYERS
from sealring.v1 import model_pb2

MOST = 1 << 50


def profile(layers: int = 3, **changes: Any) -> model_pb2.ModelProfile:
    values: dict[str, Any] = {
        "model_type": "llama",
        "layers": layers,
        "layer_bytes": [100] * layers,
        "embed_bytes": 10,
        "head_bytes": 7,
        "kv_bytes_per_token": [2] * layers,
        "kv_max_tokens": [0] * layers,
        "state_bytes": [1] * layers,
        "max_context": 2048,
        "digest": "ab" * 32,
    }
    return model_pb2.ModelProfile(**(values | changes))


def test_a_tenth_is_left_free() -> None:
    assert [capacity(memory) for memory in (0, 9, 10, 1000)] == [0, 9, 9, 900]


def test_layers_ask_for_weights_and_one_row() -> None:
    asked = Demand.of(profile(layer_bytes=[100, 50, 70], kv_max_tokens=[0, 8, 0]), 64)
    assert asked.row == (129, 17, 129)
    assert asked.per_layer == [229, 67, 199]
    assert Demand.of(profile(kv_max_tokens=[8] * 3), 64, chunk=4).row == (25,) * 3
    assert Demand.of(profile(kv_max_tokens=[8] * 3), 6, chunk=4).row == (13,) * 3
    assert Demand.of(profile(kv_max_tokens=[1, 0, 9]), 9, slack=4).row == (3, 27, 27)
    assert (asked.row_bytes(0, 2), asked.row_bytes(1, 3), asked.row_bytes(1, 1)) == (146, 146, 0)
    assert [asked.weight_bytes(0, 2, 0, 2), asked.weight_bytes(2, 3, 1, 2)] == [160, 77]
    assert asked.total(1) == asked.total(2) == 229 + 67 + 199 + 17


@given(
    st.sampled_from([0, 1, 4096, 8191, 8192, 32_768]),
    st.integers(1, 65_536),
    st.integers(0, 65_536),
    st.integers(1, 2048),
    st.integers(0, 2048),
)
@example(32_768, 32_768, 1, 256, 0)
def test_a_longer_context_or_chunk_never_needs_less(
    window: int, context: int, longer: int, chunk: int, more: int
) -> None:
    """Nor in a layer whose window begins to move."""
    found = profile(kv_max_tokens=[window] * 3)
    least = Demand.of(found, context, chunk=chunk, speculate=True)
    most = Demand.of(found, context + longer, chunk=chunk + more, speculate=True)
    assert most.total(1) >= least.total(1)


def test_embedding_and_head_are_at_the_ends() -> None:
    asked, tied = Demand.of(profile(), 1), Demand.of(profile(tied=True), 1)
    assert [asked.extras(stages) for stages in (1, 2, 4)] == [[17], [10, 7], [10, 0, 0, 7]]
    assert [tied.extras(stages) for stages in (1, 2, 3)] == [[17], [10, 17], [10, 0, 17]]


def test_a_step_reads_its_layers_and_at_the_end_the_head() -> None:
    found, tied = profile(layer_bytes=[100, 50, 70]), profile(layer_bytes=[100, 50, 70], tied=True)
    for first, end, read in ((0, 2, 150), (1, 2, 50), (2, 2, 0)):
        assert read_bytes(found, first, end) == read_bytes(tied, first, end) == read
    assert (read_bytes(found, 1, 3), read_bytes(tied, 1, 3)) == (127, 137)


def test_how_many_layers_fit_into_what_there_is() -> None:
    asked = Demand.of(profile(4, layer_bytes=[97, 7, 17, 197]), 1)  # with a row: 100, 10, 20, 200
    assert [asked.first_layers(room) for room in (99, 100, 109, 110, 1000)] == [0, 1, 1, 2, 4]
    assert [asked.last_layers(room) for room in (199, 200, 219, 220, 1000)] == [0, 1, 1, 2, 4]
    assert [asked.longest_run(room) for room in (9, 10, 29, 30, 129, 130, 330)] == [0, 1, 1, 2, 2, 3, 4]
    assert [asked.first_layers(-1), asked.last_layers(-1), asked.longest_run(30)] == [0, 0, 2]
    assert Demand.of(profile(2, layer_bytes=[7, 97]), 1).longest_run(10) == 1


def test_caches_in_fewer_bits_are_as_the_nodes_measured_them() -> None:
    quantized = [model_pb2.QuantizedCaches(bits=8, kv_bytes_per_token=[1] * 3)]
    found = profile(quantized=quantized)
    assert list(kv_bytes_per_token(found, 0)) == [2] * 3
    assert list(kv_bytes_per_token(found, 8)) == [1] * 3
    with pytest.raises(ModelError, match="do not keep the model's KV cache in 4 bits"):
        kv_bytes_per_token(found, 4)
    with pytest.raises(ModelError) as caught:
        kv_bytes_per_token(profile(quantized=quantized, not_quantizable="too narrow"), 4)
    assert (caught.value.reason, caught.value.message) == ("KV_BITS_UNSUPPORTED", "too narrow")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": MAX_LAYERS},
        {"layer_bytes": [MOST] * 3, "embed_bytes": MOST, "head_bytes": MOST, "handoff_bytes_per_token": MOST},
        {"max_context": MAX_CONTEXT},
        {"not_quantizable": "x" * 1000},
        {"quantized": [model_pb2.QuantizedCaches(bits=8, kv_bytes_per_token=[1] * 3)] * 8},
        {"model_type": "a" * 64},
        {"commit": "c" * 40},
        {"commit": "c" * 40, "hub_files": "a" * 64},
        {"card": {"parameters": MOST, "precision": "p" * 64}},
    ],
)
def test_a_profile_up_to_its_bounds_is_taken(changes: dict[str, Any]) -> None:
    layers = changes.get("layers", 3)
    check_profile(profile(layers, **{key: value for key, value in changes.items() if key != "layers"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"layers": MAX_LAYERS + 1},
        {"layer_bytes": [1] * 2},
        {"layer_bytes": [1, 1, MOST + 1]},
        {"kv_bytes_per_token": [1] * 4},
        {"state_bytes": []},
        {"state_bytes": [MOST + 1] * 3},
        {"embed_bytes": MOST + 1},
        {"head_bytes": MOST + 1},
        {"handoff_bytes_per_token": MOST + 1},
        {"max_context": MAX_CONTEXT + 1},
        {"not_quantizable": "x" * 1001},
        {"not_seeing": "x" * 1001},
        {"residents": [{"name": "vision", "at": "RING_END_HEAD", "layers": 4}]},
        {"residents": [{"name": "mtp", "at": "RING_END_TAIL", "layers": 1}]},
        {"residents": [{"name": "vision", "at": "RING_END_HEAD"}] * 2},
        {"residents": [{"name": f"{each}", "at": "RING_END_HEAD"} for each in range(17)]},
        {"residents": [{"name": "vision"}]},
        {"residents": [{"name": "a tower", "at": "RING_END_HEAD"}]},
        {"residents": [{"name": "vision", "at": "RING_END_HEAD", "does": "x" * 1001}]},
        {"residents": [{"name": "vision", "at": "RING_END_HEAD", "bytes": MOST + 1}]},
        {"residents": [{"name": "mtp", "at": "RING_END_TAIL", "bytes_per_token": MOST}]},
        {"quantized": [model_pb2.QuantizedCaches(bits=8, kv_bytes_per_token=[1] * 3)] * 9},
        {"quantized": [model_pb2.QuantizedCaches(bits=8, kv_bytes_per_token=[1] * 2)]},
        {"digest": "AB" * 32},
        {"digest": "ab" * 32 + "\n"},
        {"model_type": ""},
        {"model_type": "a" * 65},
        {"card": {"parameters": MOST + 1}},
        {"card": {"precision": "four bits"}},
        {"commit": "c" * 39},
        {"commit": "c" * 39 + "C"},
        {"commit": "main"},
        {"hub_files": "a" * 64},
        {"commit": "c" * 40, "hub_files": "A" * 64},
    ],
)
def test_a_profile_beyond_its_bounds_is_not_believed(changes: dict[str, Any]) -> None:
    layers = changes.get("layers", 3)
    with pytest.raises(ModelError) as caught:
        check_profile(profile(layers, **{key: value for key, value in changes.items() if key != "layers"}))
    assert caught.value.reason == "BAD_PROFILE"
