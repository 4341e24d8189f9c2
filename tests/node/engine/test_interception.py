"""Arrays in a model's state, and modules that have arrays of their own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from sealring.node.engine.staging.interception import leaves, own_arrays


def test_leaves_of_containers_are_found_and_modules_are_not_opened() -> None:
    inner = nn.Linear(2, 2)
    assert list(leaves({"a": [1, (2, {"b": 3})], "c": inner, "d": []})) == [1, 2, 3, inner]
    for leaf in (4, None, "text", inner):
        assert list(leaves(leaf)) == [leaf]


def test_a_modules_own_parameters_are_those_outside_other_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = mx.ones(2)
            self.tables = {"one": [mx.zeros(1)]}
            self.inner = nn.Linear(2, 2)
            self._private = mx.ones(1)
            self.size = 3

    assert [name for name, _ in own_arrays(Model())] == ["scale", "tables"]
