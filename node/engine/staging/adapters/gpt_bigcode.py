"""GPT-BigCode: mlx-lm makes positions from one offset for all rows, so rows run one at a time."""

from .base import Adapter

ADAPTER = Adapter(batches=False)
