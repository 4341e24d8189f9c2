"""Cuts an mlx-lm model into stages and runs them. See `stage` for how, `anatomy` for what is learnt first."""

from .doubled import Prefill, share
from .layout import StageSpec, TensorSpec
from .randomness import random_model, random_stage
from .shards import Shard, ShardSpec
from .skeleton import build_skeleton
from .stage import Stage

__all__ = [
    "Prefill",
    "Shard",
    "ShardSpec",
    "Stage",
    "StageSpec",
    "TensorSpec",
    "build_skeleton",
    "random_model",
    "random_stage",
    "share",
]
