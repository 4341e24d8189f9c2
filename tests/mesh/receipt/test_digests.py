"""Two answers that a reader can tell apart have two hashes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.receipt.digests import canonical_arguments

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_arguments_are_the_same_however_they_are_written(value: object) -> None:
    text = json.dumps(value)
    assert canonical_arguments(text) == canonical_arguments(json.dumps(value, indent=2, ensure_ascii=False))
    assert json.loads(canonical_arguments(text)) == value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
        ('{"b": {"a": 1, "a": 2}}', '{"b": {"a": 2}}'),
        ('{"a": 1e999}', '{"a": 2e999}'),
        ('{"a": 1e999}', '{"a": Infinity}'),
        ('{"a": NaN}', '{"a": -NaN}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
    ],
)
def test_arguments_that_a_reader_may_read_otherwise_have_other_hashes(one: str, other: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)
