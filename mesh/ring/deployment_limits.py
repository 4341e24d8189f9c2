"""Limits of a deployment, shared by the command line, the coordinator and the nodes."""

JACCL = "jaccl"
BACKENDS = ("ring", JACCL, "nccl")
"""Backends of MLX's distributed groups, for tensor deployments."""

MAX_CONTEXT = 1 << 24
"""Tokens."""

MAX_LAYERS = 1024
MAX_PREFILL_CHUNK = 8192
MAX_REPLICAS = 1000
MAX_ROWS = 256
MAX_STAGES = 256
