"""Benchmarks: one module per table of docs/performance.md, run by `sealring bench NAME`."""
