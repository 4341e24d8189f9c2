"""Bytes of caches, by the profile of a model's layers."""

from __future__ import annotations

from typing import Any

from sealring.mesh.errors import ModelError
from sealring.mesh.ring.composition import MAX_DRAFTS
from sealring.mesh.ring.limits import MAX_RUNS
from sealring.node.engine.caches.plain import BLOCK, extra_bytes


def kv_bytes(measured: dict[str, Any], lo: int, hi: int, context: int, chunk: int) -> tuple[int, int]:
    """Bytes of cache per token of a row, and per row whatever its length, of the layers [lo, hi).

    A layer whose window is shorter than the context counts as full per row; while a prompt is read it holds
    the window and a chunk, and so does a row that then waits for a lane.
    """
    per_token = per_row = 0
    for growth, window, state in _layers(measured, lo, hi):
        per_row += state
        if window and window < context:
            per_row += growth * min(context, window + chunk)
        else:
            per_token += growth + extra_bytes(growth, context)
            per_row += growth * BLOCK
    return per_token, per_row


def draft_bytes(measured: dict[str, Any], lo: int, hi: int, context: int, runs: int) -> int:
    """Bytes that are kept to take `runs` runs of one row back in the layers [lo, hi): what windows have
    dropped, a state for each run and, where there are states, what the runs were computed on."""
    layers = _layers(measured, lo, hi)
    runs = min(runs, MAX_RUNS)
    tokens = runs * (1 + MAX_DRAFTS)
    dropped = sum(growth for growth, window, _ in layers if window and window < context)
    states = sum(state for _, _, state in layers)
    inputs: int = measured["handoff_bytes_per_token"] if states else 0
    return int(tokens * (dropped + inputs) + runs * states)


def mark_bytes(measured: dict[str, Any], lo: int, hi: int, context: int) -> int:
    """Bytes of the windows and states of the layers [lo, hi), as they are after one token of a row. 0 where
    no layer has any: nothing is planned for them either."""
    layers = _layers(measured, lo, hi)
    return sum(int(state + growth * min(window or 0, context)) for growth, window, state in layers)


def _layers(measured: dict[str, Any], lo: int, hi: int) -> list[tuple[int, int | None, int]]:
    """Bytes a token, tokens of the window, if any, and bytes of the state of each layer [lo, hi)."""
    columns = (measured[name][lo:hi] for name in ("kv_bytes_per_token", "kv_max_tokens", "state_bytes"))
    return list(zip(*columns, strict=True))


def with_kv_bits(measured: dict[str, Any], bits: int) -> dict[str, Any]:
    """The profile with caches of `bits` bits, unchanged for 0. Raises ModelError (KV_BITS_UNSUPPORTED)."""
    if not bits:
        return measured
    for one in measured["quantized"]:
        if one["bits"] == bits:
            return measured | {"kv_bytes_per_token": one["kv_bytes_per_token"]}
    raise ModelError(
        measured["not_quantizable"] or f"caches are not kept in {bits} bits",
        reason="KV_BITS_UNSUPPORTED",
        hint="deploy it without kv_bits",
    )
