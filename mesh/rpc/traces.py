"""What nodes and the coordinator agree on about traces (protos/sealring/v1/trace.proto)."""

MAX_SPANS = 32768
"""Of one process in one answer."""
