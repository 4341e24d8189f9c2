"""Benchmarks: one module per table of docs/performance.md, run by `sealring bench NAME`."""

from sealring.node import scratch

scratch.claim()  # before anything here imports mlx
