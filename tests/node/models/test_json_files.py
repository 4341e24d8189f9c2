"""JSON of model folders: bounded in bytes and in values before it is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.node.models import json_files
from sealring.node.models.json_files import INDEX_VALUES, LIMITS, check_json, limit_of, parse_json, read_json

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> int:
    """Values and keys that JSON makes of it, without the outermost one."""
    if isinstance(value, dict):
        return sum(1 + counted(one) for one in value.values())
    return sum(1 + counted(one) for one in value) if isinstance(value, list) else 0


@given(VALUES, st.integers(0, 40))
def test_nothing_of_more_values_is_parsed(value: Any, most: int) -> None:
    text = json.dumps(value).encode()
    try:
        assert parse_json(text, most) == value
    except ValueError:
        assert len(text) > most
    else:
        assert counted(value) <= most


@pytest.mark.parametrize(("pattern", "limit", "most"), [one for one in LIMITS if one[2]])
def test_each_kind_has_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, limit: int, most: int
) -> None:
    file = tmp_path / pattern.replace("*", "vocab" if pattern == "vocab.*" else "model.safetensors")
    assert limit_of(file.name) == limit
    assert most * 256 <= 1 << 30, "bytes of memory, at the 170 of an entry in a dictionary"
    file.write_bytes(b"[" + b"0," * (most - 1) + b"0]")
    check_json(file)
    file.write_bytes(b"[" + b"0," * most + b"0]")
    monkeypatch.setattr(json_files.json, "loads", lambda text: pytest.fail("parsed"))
    with pytest.raises(ValueError, match="values"):
        read_json(file)
    with file.open("wb") as stream:
        stream.truncate(limit + 1)
    with pytest.raises(ValueError, match="bytes"):
        check_json(file)


def test_the_index_of_the_largest_published_model_is_read(tmp_path: Path) -> None:
    """Kimi-K2-Thinking has 208,000 tensors, under names of this length."""
    name = "language_model.model.layers.{}.mlp.experts.{}.down_proj.weight_packed"
    tensors = {
        name.format(one // 3456, one): f"model-{one % 62:05}-of-000062.safetensors" for one in range(208_000)
    }
    assert len(tensors) < INDEX_VALUES
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": tensors}, indent=2))
    assert read_json(file)["weight_map"] == tensors
