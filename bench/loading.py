"""Memory that an engine needs while it loads a stage, over the stage's own.

Each load is a process of its own, whose peak is compared with what it had before: VmHWM on Linux, on a Mac
the most that was ever resident. `apart` is a repository whose experts mlx-lm has to stack.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.frame import Result, Table, progress
from bench.verdict import Check

QUICK = ("--width", "256", "--rounds", "1")
TARGETS = {"llama": 1.1, "llama, bfloat16": 1.1, "mixtral, experts apart": 1.15}
_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
_MIXTRAL = _LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
}


def run(options: argparse.Namespace) -> Result:
    """MiB by kind of model and round: the stage, and by how much the process grew at most to load it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in TARGETS:
        with tempfile.TemporaryDirectory(prefix="loading-", dir=options.folder) as home:
            progress(f"{kind}: writing the model")
            layers = _in_a_process("write", kind, str(options.width), home)["layers"]
            for number in range(options.rounds):
                progress(f"{kind}: round {number + 1}")
                measured = _in_a_process("load", home, str(layers // 4), str(3 * layers // 4))
                found.setdefault(kind, []).append(measured)
    return {"width": options.width, "kinds": found}


def _in_a_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.loading", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def write(kind: str, width: str, home: str) -> dict[str, Any]:
    """A model with random weights as it would be published."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from sealring.node.engine.staging import random_model

    mx.set_default_device(mx.cpu)
    wide = int(width)
    shape = _LLAMA if kind.startswith("llama") else _MIXTRAL
    own = wide if shape is _LLAMA else wide // 2
    config = shape | {"hidden_size": own, "intermediate_size": 3 * own}
    model = random_model(config, seed=1, dtype=mx.bfloat16 if "bfloat16" in kind else mx.float32)
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        layer, stacked, projection = name.partition(".switch_mlp.")
        if not stacked:
            weights[name] = array
            continue
        for expert, each in enumerate(array):
            part = names[projection.removesuffix(".weight")]
            weights[f"{layer}.experts.{expert}.{part}.weight"] = each
    Path(home, "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(Path(home, "model.safetensors")), weights)
    return {"layers": config["num_hidden_layers"]}


def load(home: str, lo: str, hi: str) -> dict[str, float]:
    """Loads the layers [lo, hi) as an engine does."""
    import mlx.core as mx
    import psutil

    from sealring.node.engine import device, nvidia
    from sealring.node.engine.profile import profile
    from sealring.node.engine.weights import load_stage

    nvidia.prepare()
    device.prepare()
    device.compute_in_batches()
    mx.eval(mx.zeros((1,)) + 1)
    profile(Path(home))
    before = psutil.Process().memory_info().rss
    stage = load_stage(Path(home), int(lo), int(hi))
    sizes = {"stage_mib": float(stage.weight_bytes), "peak_mib": _peak() - before}
    sizes["mlx_peak_mib"] = float(mx.get_peak_memory())
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def _peak() -> float:
    """Bytes resident at most. On Linux `ru_maxrss` begins with that of the process that started this one."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found
        return int(found[1]) * 1024.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def checks(result: Result) -> list[Check]:
    return [
        Check(
            f"memory while loading over the stage, {kind}",
            [round(one["peak_mib"] / one["stage_mib"], 3) for one in rounds],
            TARGETS[kind],
        )
        for kind, rounds in result["kinds"].items()
    ]


def tables(result: Result) -> list[Table]:
    rows = [[kind, *one.values()] for kind, rounds in result["kinds"].items() for one in rounds]
    return [Table("MiB, round by round", ["model", "stage", "peak", "MLX's peak"], rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=1024, help="of the model; with 1024 a llama has 576 MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where models are written")


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    sys.stdout.write(json.dumps((write if name == "write" else load)(*given)))  # type: ignore[operator]
