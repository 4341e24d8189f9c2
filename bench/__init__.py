"""Benchmarks: one module per table of docs/performance.md, run by `python -m bench NAME`."""

from sealring.node import scratch

scratch.claim()  # before anything here imports mlx
