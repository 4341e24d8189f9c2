"""A shard: every layer of a model, and of each a part, as mlx-lm's own `shard()` cuts it (tensor parallel).

The ranks of a group compute the same step together: where mlx-lm sums over the group, each waits for the
others. Weights are cut long before the group exists, which is formed when an epoch begins; until then, and
for trials, a group of one stands in, in which a shard's sums are its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError

from .anatomy import dissect
from .layout import TOKENS, StageSpec
from .quantization import cache_quantization
from .stage import Stage

_COUNTS = ("num_attention_heads", "num_key_value_heads")


class Group(Protocol):
    """The methods of a group that mlx-lm's `shard()` calls."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass(frozen=True, eq=False)
class _Place:
    """A place in a group that does not exist yet."""

    own: int
    ranks: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.ranks


@dataclass(frozen=True)
class ShardSpec(StageSpec):
    """All layers of a model at one rank of `ranks`. The head has the prompts and passes token ids on, the
    tail samples; every rank makes the logits."""

    rank: int = 0
    ranks: int = 1

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    @property
    def is_tail(self) -> bool:
        return self.rank == self.ranks - 1

    @property
    def makes_logits(self) -> bool:
        return True


class Shard(Stage):
    """A whole model of which each layer is in part here."""

    def __init__(self, model: nn.Module, rank: int, ranks: int, model_type: str, kv_bits: int = 0) -> None:
        """Takes the model over. Raises ModelError as `sharded` does."""
        self._members = sharded(model, rank, ranks, model_type)
        anatomy = dissect(model, model_type)
        quantization = cache_quantization(model, model_type, kv_bits) if kv_bits else None
        super().__init__(model, anatomy, 0, len(anatomy.layers), quantization=quantization)
        self.computed_as = lambda tokens: tokens  # the ranks' sums have one shape on whatever devices
        whole = self.spec
        hands_on = whole.hands_on if rank == ranks - 1 else (TOKENS,)
        self.spec = ShardSpec(
            model_type, whole.layers, 0, whole.hi, (TOKENS,), hands_on, rank=rank, ranks=ranks
        )

    def join(self, group: Group) -> None:
        """Computes with the other ranks from now on, or alone again in a group of one."""
        for module, name in self._members:
            setattr(module, name, group)


def sharded(model: nn.Module, rank: int, ranks: int, model_type: str) -> list[tuple[nn.Module, str]]:
    """Cuts a model's parameters down to the part of one rank, lazily: the modules that sum over the group,
    and under which name they have it.

    Raises ModelError (NOT_SHARDABLE).
    """
    cut = getattr(model, "shard", None)
    if cut is None:
        raise not_shardable(model_type, ranks, "mlx-lm does not shard this architecture")
    if hasattr(model, "pooling"):
        raise not_shardable(model_type, ranks, "it ends with vectors")
    for name, count in _counts(model):
        if count % ranks:
            raise not_shardable(model_type, ranks, f"{name} is {count}")
    place = _Place(rank, ranks)
    try:
        cut(place)
    except Exception as error:  # a model's own code may raise anything on sizes that do not divide
        words = " ".join(str(error).split())[:160]
        raise not_shardable(model_type, ranks, words or type(error).__name__) from error
    members = [
        (module, name) for module in model.modules() for name, value in vars(module).items() if value is place
    ]
    alone = _group_of_one()
    for module, name in members:
        setattr(module, name, alone)
    if sys.getrefcount(place) > 2:  # this one's name and the call's own
        raise not_shardable(model_type, ranks, "its code keeps the group where it cannot be exchanged")
    if not members:
        raise not_shardable(model_type, ranks, "nothing in it sums over a group")
    return members


def _group_of_one() -> Group:
    """MLX looks for MPI first, whose library ends a process that `mpirun` did not start."""
    os.environ["MLX_MPI_LIBNAME"] = "none"
    return mx.distributed.init()


def _counts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """How many heads there are: mlx-lm rounds, and what comes out may be of the right shape and wrong."""
    for module in model.modules():
        for name in _COUNTS:
            count = getattr(getattr(module, "args", None), name, None)
            if isinstance(count, int):
                yield name, count


def not_shardable(model_type: str, ranks: int, why: str) -> ModelError:
    return ModelError(
        f"a {model_type} model cannot be divided among {ranks} ranks: {why}",
        reason="NOT_SHARDABLE",
        hint="deploy it with the pipeline strategy, or with another number of stages",
    )
