"""The carrier of a seat: it connects the ring, and seals, sends, receives and opens records."""

from sealring.node import scratch

scratch.claim()  # before anything here imports mlx
