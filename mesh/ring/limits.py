"""Limits that the command line, the coordinator and the nodes share; processes without gRPC import them."""

JACCL = "jaccl"
BACKENDS = ("ring", JACCL, "nccl")
"""Backends of MLX's distributed groups, for tensor deployments."""

MAX_ALIASES = 16
MAX_CONTEXT = 1 << 24
"""Tokens."""

MAX_KEEP_ALIVE = 30 * 86400
"""Seconds that a model on demand stays loaded without a request; 0 stands for ever."""

MAX_LAYERS = 1024
MAX_PREFILL_CHUNK = 8192
MAX_REPLICAS = 1000
MAX_ROWS = 256
MAX_STAGES = 256

MAX_SPANS = 32768
"""Spans of one process in one answer to a trace (protos/sealring/v1/trace.proto)."""

DRAFT_MARKS = 16
"""Marks that a draft model keeps of its rows where its caches cannot be cut. Policy: 8 of the row that it
guesses for, and 2 or 3 of each of the last rows before."""

MAX_TAPS = 16
"""Layers of which a drafter at a tail reads hidden states. Policy: published ones read 3 to 6."""

DRAFT_ROWS = 4
"""Rows that a draft model guesses for at once. Policy: of more, a step of all takes as long as their guesses
would save."""

HEAD_ROWS = 8
"""Rows for which an MTP head guesses, of all lanes. Policy: with more, stages are busy without drafts."""

MAX_RUNS = 4
"""Runs of drafts of all rows together that are not settled, where caches cannot be cut, however many stages
there are: what takes them back needs memory, a state for each run. A member that says more can cut its
caches."""
