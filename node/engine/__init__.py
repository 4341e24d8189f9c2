"""A member's engine: it computes a stage of the model. Its public names come from here.

They are imported when they are asked for, since no stage needs all of them: a middle one reads no text.
"""

from sealring.mesh.system.faces import face
from sealring.node import scratch

scratch.claim()  # before anything here imports mlx

__all__, __getattr__ = face(
    __name__,
    allowance="Account Allowance",
    apart="ask_apart",
    borders="Borders borders_of",
    check="ranges_of",
    check_images="Prompt WholeVisionModel check_family prompts random_whole save",
    device="CHUNK Accelerator compute_in_batches",
    cache_bytes="draft_bytes kv_bytes mark_bytes",
    epoch="StageEpoch",
    generation="own_options with_own",
    grammar="Grammars",
    logprobs="Asking TokenLogprobs asking_of",
    mlx_lm_import="import_whole",
    params="DEFAULT_CONTEXT_SIZE RowParameters",
    prefixes="Prefixes support",
    row_seal="RowSeal",
    profile="digest",
    ranges="needed",
    receipts="Delivered Sampled bring",
    seats="seat_of",
    transfer="SharedSendBuffer Transfer",
    weights="load_lazily load_stage read_config read_header weight_files",
)
