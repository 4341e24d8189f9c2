"""Architectures that compute the same in parts of every layer.

`python -m bench.shards FILE.json > found.json`

FILE has configurations by name, as `tests/support/small_models.py` prints them. Each that mlx-lm can shard is
given heads that 4 ranks divide, random weights, and the schedule of `sealring model check`, on 2 and on 4
processes over MLX's ring; `exact` means that logits differ from the whole model's by no more than rounding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

RANKS = (2, 4)
_HEADS = 8
_GROUPS = ("num_key_value_heads", "num_attention_groups", "o_groups", "sparse_num_index_heads")
_SILENT_SECONDS = 300.0
_LOOK_SECONDS = 1.0
_TRIES = 3
_TOGETHER = ""
"""The first message of rank 0, in the place of a key: the group has formed."""

_TEXT = "text_config"


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with numbers of heads that every number of ranks divides, as wide as before."""
    wide = {name: widened(value) if isinstance(value, dict) else value for name, value in config.items()}
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % max(RANKS):
        wide["num_attention_heads"] = heads = _HEADS
    for name in _GROUPS:
        if isinstance(wide.get(name), int) and wide[name] % max(RANKS):
            wide[name] = max(RANKS) if heads is None or heads % max(RANKS) == 0 else heads
    return wide


def check_all(file: Path, keys: Sequence[str], ranks: int) -> dict[str, str]:
    """The outcome of each key. A configuration that ends or stalls the ranks is noted, and others go on.

    Raises RuntimeError where the ranks do not come together: MLX gives up in half a minute if one of them is
    slow to start, and the others wait for it for ever.
    """
    found: dict[str, str] = {}
    left, apart = list(keys), 0
    while left:
        together = False
        for key, outcome in _outcomes(file, left, ranks):
            together = True
            if key != _TOGETHER:
                found[key] = outcome
        left = [key for key in left if key not in found]
        if left and together:
            found[left[0]] = "it ended or stalled the ranks"
            left = left[1:]
        elif left:
            apart += 1
            if apart == _TRIES:
                raise RuntimeError(f"{ranks} ranks do not come together")
    return found


def _outcomes(file: Path, keys: Sequence[str], ranks: int) -> Iterator[tuple[str, str]]:
    from sealring.mesh.system.addresses import free_port

    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
        workers = [
            subprocess.Popen(
                _command(file, keys),
                env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]
        lines: SimpleQueue[str] = SimpleQueue()
        output = workers[0].stdout
        assert output is not None

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put("")

        reader = threading.Thread(target=read)
        reader.start()
        try:
            silent = 0.0
            while silent < _SILENT_SECONDS:
                try:
                    line = lines.get(timeout=_LOOK_SECONDS)
                except Empty:
                    silent += _LOOK_SECONDS
                    if any(worker.poll() not in (None, 0) for worker in workers):
                        break  # which the others would wait for
                    continue
                if not line:
                    break
                silent = 0.0
                yield json.loads(line)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            reader.join()
            output.close()


def _command(file: Path, keys: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", __spec__.name, str(file), *keys]


def work(file: Path, keys: Sequence[str]) -> None:
    """One rank's part; that of rank 0 tells."""
    import mlx.core as mx

    from sealring.mesh.errors import ModelError
    from sealring.node.engine import device

    device.compute_in_batches()
    hosts = os.environ.pop("MLX_HOSTFILE")
    mx.distributed.init()  # of one, as in an engine that loads before its group is formed
    os.environ["MLX_HOSTFILE"] = hosts
    group = mx.distributed.init(strict=True, backend="ring")
    _tell(group, _TOGETHER, "")
    configurations = json.loads(file.read_bytes())
    for key in keys:
        try:
            outcome = _outcome(widened(configurations[key]), group)
        except ModelError as error:
            outcome = error.message
        _tell(group, key, outcome)


def _tell(group: Any, key: str, outcome: str) -> None:
    if group.rank() == 0:
        sys.stdout.write(json.dumps([key, outcome]) + "\n")
        sys.stdout.flush()


def _outcome(config: dict[str, Any], group: Any) -> str:
    import mlx.core as mx

    from sealring.node.engine.check_runs import (
        Whole,
        comparable,
        follow_schedule,
        largest_difference,
        random_prompts,
        rounding,
    )
    from sealring.node.engine.staging import Shard, random_model
    from sealring.node.engine.staging.anatomy import dissect

    class Sharded:
        def new_cache(self) -> list[Any]:
            return [stage.make_cache()]

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            outputs = stage([tokens], cache[0])
            mx.eval(outputs)
            return outputs[0]

    kind = config["model_type"]
    stage = Shard(random_model(config, seed=0), group.rank(), group.size(), kind)
    mx.eval(stage.kept)
    text = config.get(_TEXT, config)
    prompts = random_prompts(3, int(text.get("vocab_size", config.get("vocab_size", 0)) or 100), 0)
    whole = random_model(config, seed=0)
    adapter = dissect(whole, kind).adapter
    wanted = None if group.rank() else follow_schedule(prompts, Whole(whole, adapter))
    stage.join(group)
    run = follow_schedule(prompts, Sharded())  # type: ignore[arg-type]
    if wanted is None:
        return ""
    difference = largest_difference(*comparable(wanted, run))
    if difference is None or difference > rounding(wanted):
        return f"logits differ by {difference}, and rounding is {rounding(wanted)}"
    return "exact"


def shardable(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has a way to shard the architecture that runs here."""
    from sealring.mesh.errors import ModelError
    from sealring.node.engine.staging import build_skeleton

    try:
        return hasattr(build_skeleton(config), "shard")
    except ModelError:
        return False


def main() -> None:
    file, *keys = Path(sys.argv[1]), *sys.argv[2:]
    if "MLX_RANK" in os.environ:
        work(file, keys)
        return
    configurations = json.loads(file.read_bytes())
    served = [key for key in keys or configurations if shardable(configurations[key])]
    found: dict[str, Any] = {key: {"ranks": {}} for key in keys or configurations}
    for ranks in RANKS:
        for key, outcome in check_all(file, served, ranks).items():
            found[key]["ranks"][str(ranks)] = outcome
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
