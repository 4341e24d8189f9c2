"""A limit on traces that nodes and the coordinator share (protos/sealring/v1/trace.proto)."""

MAX_SPANS = 32768
"""Spans of one process in one answer."""
