"""Lengths beyond which a model may compute otherwise: its windows, chunks, pools, and chosen keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.nn as nn

MOST = 1 << 17
"""Tokens. A larger number is the size of something else."""

_LENGTH = re.compile(r"window|chunk|block_size|index_block|local_tokens|init_tokens|sink_tokens|stride")
_CHOSEN = re.compile(r"top_?k")
_POOLED = re.compile(r"ratio|pool|block_size|index_block$|stride")
_OTHER = re.compile(
    r"vision|image|audio|video|expert|moe|group|layer|pattern|freq|vocab|dim|width|height|num_heads"
)


def reach_of(model: nn.Module) -> int:
    """The largest of the lengths that the arguments of a model name, in tokens; 0 if they name none. Chosen
    keys count as often as a pool or block holds tokens."""
    named = list(_numbers(getattr(model, "args", None), 0))
    lengths = [value for name, value in named if _LENGTH.search(name)]
    pooled = [value for name, value in named if _POOLED.search(name) and value <= 1024]
    chosen = [value * max(pooled, default=1) for name, value in named if _CHOSEN.search(name)]
    return max((value for value in (*lengths, *chosen) if value <= MOST), default=0)


def _numbers(part: Any, depth: int) -> Iterator[tuple[str, int]]:
    """Whole numbers by their names, of arguments and what they hold."""
    fields = part if isinstance(part, Mapping) else getattr(part, "__dict__", {})
    for name, value in fields.items():
        if not isinstance(name, str) or _OTHER.search(name):
            continue
        if isinstance(value, list):
            yield from ((name, one) for one in value if type(one) is int and one > 1)
        elif type(value) is int and value > 1:
            yield name, value
        elif depth < 3:
            yield from _numbers(value, depth + 1)
