"""A table of which a step reads few rows, mapped from a model's files instead of read into memory.

Qwen4 adds rows of a table of n-grams to its first layers' states: 51 GB in a model of 125. mlx-vlm keeps the
table as embeddings in shards. In their place stands a module without parameters, so that a stage holds none
of their bytes and no plan counts them. It looks rows up on the host, which waits for the step's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

if TYPE_CHECKING:
    import numpy as np  # which no other model needs to be loaded

_PART = re.compile(
    r"layers\.(\d{1,4})\.ple\.ple_embedding\.ngram_embedding\.shards?[._](\d{1,6})\.(weight|scales|biases)"
)
_SCALE = re.compile(r"layers\.(\d{1,4})\.ple\.ple_embedding\.ngram_embedding\.weight_scale$")
_EIGHT_BITS = "F8_E4M3"
_DTYPES = {
    "F32": ("float32", mx.float32),
    "F16": ("float16", mx.float16),
    "BF16": ("uint16", mx.bfloat16),
    "U32": ("uint32", mx.uint32),
    "U8": ("uint8", mx.uint8),
    _EIGHT_BITS: ("uint8", mx.uint8),
}
"""In the files, by safetensors' names, and in MLX. numpy has no bfloat16."""

_FLOATS = ("F32", "F16", "BF16")


@dataclass
class _Part:
    """One tensor of a shard, [rows, width]."""

    file: Path
    first: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    _rows: Any = field(default=None, repr=False)

    def rows(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import numpy as np

        if self._rows is None:
            kind = _DTYPES[self.dtype][0]
            self._rows = np.memmap(self.file, kind, "r", offset=self.first, shape=self.shape)
        return np.asarray(self._rows[indices])

    def array(self) -> mx.array:
        """All of it."""
        import numpy as np

        return mx.array(self.rows(np.arange(self.shape[0]))).view(_DTYPES[self.dtype][1])


class MappedTable(nn.Module):  # type: ignore[misc]
    """Rows by their indices, as mlx-vlm's `ShardedEmbedding` gives them."""

    def __init__(
        self,
        shards: Mapping[int, Mapping[str, _Part]],
        quantized: Mapping[str, Any],
        scale: _Part | None = None,
    ) -> None:
        """`quantized`: the arguments of `mx.dequantize`, if the rows are; `scale` is that of 8-bit floats."""
        super().__init__()
        self._held = _Held([dict(shards[number]) for number in sorted(shards)], dict(quantized), scale)

    @property
    def ranges(self) -> list[tuple[str, int, int]]:
        """The bytes of files that it reads: a file's name and its bytes [first, end)."""
        parts = [part for shard in self._held.shards for part in shard.values()]
        scales = [] if self._held.scale is None else [self._held.scale]
        return [(part.file.name, part.first, part.end) for part in parts + scales]

    def __call__(self, indices: mx.array) -> mx.array:
        """Indices of any shape to [*shape, width]. Waits for the indices."""
        import numpy as np

        wanted = np.array(indices)
        rows, where = np.unique(wanted, return_inverse=True)
        found = self._held.read(rows)
        table = found.pop("weight")
        if (scale := self._held.scale) is not None:
            table = mx.from_fp8(table, dtype=mx.bfloat16) * scale.array().reshape(())
        if self._held.quantized:
            table = mx.dequantize(table, found["scales"], found.get("biases"), **self._held.quantized)
        return table[mx.array(where.reshape(wanted.shape))]


@dataclass
class _Held:
    """What is no parameter of a module."""

    shards: list[dict[str, _Part]]
    quantized: dict[str, Any]
    scale: _Part | None

    def read(self, rows: np.ndarray[Any, Any]) -> dict[str, mx.array]:
        """Rows in ascending order, by the tensors' names. Raises IndexError behind the last row."""
        import numpy as np

        ends = np.cumsum([shard["weight"].shape[0] for shard in self.shards])
        if rows.size and not 0 <= rows[0] <= rows[-1] < ends[-1]:
            raise IndexError("a row is outside the table")
        owner = np.searchsorted(ends, rows, side="right")
        found = {}
        for name, part in self.shards[0].items():
            own = [
                shard[name].rows(rows[owner == place] - (ends[place - 1] if place else 0))
                for place, shard in enumerate(self.shards)
                if (owner == place).any()
            ]
            array = mx.array(np.concatenate(own)) if own else mx.zeros((0, *part.shape[1:]))
            found[name] = array.view(_DTYPES[part.dtype][1])
        return found


def tables_of(modules: Iterable[nn.Module]) -> list[MappedTable]:
    """The mapped tables in some modules, such as a stage's layers."""
    return [one for module in modules for one in module.modules() if isinstance(one, MappedTable)]


def map_tables(model: nn.Module, headers: Mapping[Path, bytes]) -> None:
    """Puts a `MappedTable` in the place of each table of n-grams that the files have as the model takes it.
    `headers` are those of the files, checked."""
    tables = {
        int(match[1]): module
        for name, module in model.named_modules()
        if (match := re.search(r"layers\.(\d+)\.ple\.ple_embedding$", name))
    }
    if not tables:
        return
    found: dict[int, dict[int, dict[str, _Part]]] = {}
    scales: dict[int, _Part] = {}
    for file, header in headers.items():
        for name, entry in json.loads(header).items():
            if not (match := _PART.search(name) or _SCALE.search(name)):
                continue
            first, end = (8 + len(header) + place for place in entry["data_offsets"])
            part = _Part(file, first, end, entry["dtype"], tuple(entry["shape"]))
            if match.re is _SCALE and part.shape == (1,) and part.dtype in _FLOATS:
                scales[int(match[1])] = part
            elif match.re is _PART:
                found.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[match[3]] = part
    for layer, module in tables.items():
        own, shards, scale = module.ngram_embedding.shards, found.get(layer, {}), scales.get(layer)
        fit = all(_fits(one, shards.get(place, {}), scale) for place, one in enumerate(own))
        if fit and len(own) == len(shards):
            names = ("group_size", "bits", "mode") if "scales" in own[0] else ()
            quantized = {name: getattr(own[0], name) for name in names}
            module.ngram_embedding = MappedTable(shards, quantized, scale)


def _fits(embedding: nn.Module, parts: Mapping[str, _Part], scale: _Part | None) -> bool:
    """Whether a shard's tensors are in the files what they are in the model, or 8-bit floats that a scale
    makes that of."""
    return set(parts) == set(embedding) and all(
        part.shape == embedding[name].shape
        and (
            part.dtype == _EIGHT_BITS
            if scale is not None
            else part.dtype in _DTYPES and _DTYPES[part.dtype][1] == embedding[name].dtype
        )
        for name, part in parts.items()
    )
