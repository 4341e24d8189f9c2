"""MiniMax M3: blocks of keys are chosen by their slots, padding included, so rows run one at a time."""

from .base import Adapter

ADAPTER = Adapter(batches=False)
