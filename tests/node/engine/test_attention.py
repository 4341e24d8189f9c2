from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine import attention


def drawn(rows: int, heads: int, groups: int, new: int, held: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(7)
    return (
        mx.random.normal((rows, heads, new, 16)),
        mx.random.normal((rows, groups, held, 16)),
        mx.random.normal((rows, groups, held, 8)),
    )


def masks(rows: int, new: int, held: int) -> dict[str, Any]:
    window = mx.arange(held - new, held)[:, None] < mx.arange(held) + 3
    causal = mx.arange(held - new, held)[:, None] >= mx.arange(held)
    padded = mx.broadcast_to((window & causal)[None, None], (rows, 1, new, held))
    return {
        "none": None,
        "causal": "causal",
        "boolean": window & causal,
        "of rows": padded,
        "added": mx.where(causal, 0.0, -1e9),
    }


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    folded=st.integers(1, 4),
    new=st.integers(2, 9),
    before=st.integers(0, 9),
    mask=st.sampled_from(["none", "causal", "boolean", "of rows", "added"]),
)
def test_it_is_what_mlx_computes(
    rows: int, groups: int, folded: int, new: int, before: int, mask: str
) -> None:
    held = new + before
    arrays = drawn(rows, groups * folded, groups, new, held)
    given_mask = masks(rows, new, held)[mask]
    mine = attention.unfused(*arrays, 0.25, given_mask)
    theirs = mx.fast.scaled_dot_product_attention(*arrays, scale=0.25, mask=given_mask)
    assert mine.shape == theirs.shape
    assert mx.allclose(mine, theirs, atol=1e-4).item()


@pytest.mark.parametrize(
    ("new", "held", "others", "fused"),
    [
        (1, 1000, {}, True),
        (2, 1000, {}, False),
        (126, 126, {"sinks": None}, False),
        (126, 126, {"sinks": 1}, True),
        (512, 4096, {}, True),
        (512, 4100, {}, False),
        (256, 4096, {}, False),
        (500, 4096, {}, False),
        (600, 120_000, {}, True),
    ],
)
def test_regular_lengths_are_left_to_plans(
    monkeypatch: pytest.MonkeyPatch, new: int, held: int, others: dict[str, Any], fused: bool
) -> None:
    calls: list[str] = []

    def noted(name: str) -> Any:
        def call(*arrays: mx.array, **options: Any) -> mx.array:
            calls.append(name)
            return arrays[0]

        return call

    monkeypatch.setattr(attention, "unfused", noted("unfused"))
    queries, keys = mx.zeros((1, 4, new, 1)), mx.zeros((1, 2, held, 1))
    attention.planless(noted("fused"))(queries, keys, keys, scale=1.0, mask="causal", **others)
    assert calls == ["fused" if fused else "unfused"]


def test_a_mask_for_each_head_is_left_to_mlx() -> None:
    queries, keys = mx.zeros((1, 4, 3, 8)), mx.zeros((1, 2, 5, 8))
    mask = mx.ones((1, 4, 3, 5), mx.bool_)
    calls: list[Any] = []
    attention.planless(lambda *_, **options: calls.append(options["mask"]) or queries)(
        queries, keys, keys, scale=1.0, mask=mask
    )
    assert calls == [mask]


def test_nothing_is_replaced_without_an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    attention.install()
    assert mx.fast.scaled_dot_product_attention is before


def test_it_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "gpu", mx.default_device())
    attention.install()
    once = mx.fast.scaled_dot_product_attention
    attention.install()
    assert mx.fast.scaled_dot_product_attention is once
    assert hasattr(once, "fused")
