"""NanoChat: mlx-lm rotates all rows of a batch by the first row's offset, so rows run one at a time."""

from .base import Adapter

ADAPTER = Adapter(batches=False)
