"""The caches of a model's layers: a module for each of mlx-lm's classes (`known` has the list), and what is
done with all caches of a row, or of several rows (`rows`)."""

from sealring.node.engine import mlx_lm_import

mlx_lm_import.install()  # before anything here imports mlx_lm

from .known import kind_of, kinds, parts_of  # noqa: E402
from .rows import (  # noqa: E402
    Batch,
    Cache,
    OneRow,
    RowByRow,
    copied,
    cuts_together,
    detached,
    extract,
    first_tokens,
    for_one_row,
    holds,
    look_at,
    merge,
    put,
    recompose,
    take_back,
    trim,
    trimmable,
)

__all__ = [
    "Batch",
    "Cache",
    "OneRow",
    "RowByRow",
    "copied",
    "cuts_together",
    "detached",
    "extract",
    "first_tokens",
    "for_one_row",
    "holds",
    "kind_of",
    "kinds",
    "look_at",
    "merge",
    "parts_of",
    "put",
    "recompose",
    "take_back",
    "trim",
    "trimmable",
]
