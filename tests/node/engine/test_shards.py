"""Ranks that each compute a part of every layer: the tokens of the whole model, over MLX's ring backend."""

from __future__ import annotations

import _ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS
from stagering import SEED, config_of, run
from tensor_rank import work_of

from sealring.mesh.errors import ModelError
from sealring.mesh.system.addresses import free_port
from sealring.node.engine import device
from sealring.node.engine.staging import Shard, random_model

WORKER = Path(__file__).parents[2] / "support" / "tensor_rank.py"


def answers(families: list[str], ranks: int, folder: Path) -> list[dict[str, list[int]]]:
    """What the head delivers of each family."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
    links = [socket.socketpair() for _ in range(ranks)]
    workers = []
    for rank in range(ranks):
        ends = (links[rank - 1][1].fileno(), links[rank][0].fileno())
        command = [sys.executable, str(WORKER), str(rank), str(ranks), *map(str, ends), *families]
        environment = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        workers.append(
            subprocess.Popen(command, env=environment, pass_fds=ends, stdout=subprocess.PIPE, text=True)
        )
    for pair in links:
        for end in pair:
            end.close()
    try:
        output = workers[0].communicate(timeout=PATIENCE_SECONDS)[0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    found: list[dict[str, list[int]]] = json.loads(output)
    return found


@pytest.mark.parametrize(
    ("families", "ranks"),
    [
        (["llama", "gpt_oss"], 2),
        pytest.param(["qwen3_moe"], 2, marks=pytest.mark.sweep),
        pytest.param(["llama"], 4, marks=pytest.mark.sweep),
    ],
)
def test_ranks_answer_as_the_whole_model(families: list[str], ranks: int, tmp_path: Path) -> None:
    found = answers(families, ranks, tmp_path)
    for family, answers_of in zip(families, found, strict=True):
        wanted = run(family, 1, *work_of(family)).answers
        assert {int(row): tokens for row, tokens in answers_of.items()} == wanted


def test_a_rank_computes_as_many_tokens_as_the_others_whatever_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device.Accelerator, "computed_as", lambda self, tokens: 16)
    assert Shard(random_model(config_of("llama"), seed=SEED), 0, 2, "llama").computed_as(5) == 5


@pytest.mark.parametrize(
    ("family", "ranks", "why"),
    [("mamba2", 2, "does not shard"), ("llama", 3, "num_attention_heads is 4")],
)
def test_what_cannot_be_divided_is_refused(family: str, ranks: int, why: str) -> None:
    config = config_of(family)
    with pytest.raises(ModelError, match=why) as caught:
        Shard(random_model(config, seed=SEED), 0, ranks, config["model_type"])
    assert caught.value.reason == "NOT_SHARDABLE"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has loaded in a file")
def test_mpi_is_not_looked_for_since_its_library_would_end_the_process(tmp_path: Path) -> None:
    shutil.copy(_ctypes.__file__, tmp_path / "libmpi.so")
    code = (
        "from sealring.node.engine.staging import Shard, random_model; import json, sys\n"
        "config = json.loads(sys.argv[1])\n"
        "Shard(random_model(config, seed=1), 0, 2, config['model_type'])\n"
        "print('libmpi' in open('/proc/self/maps').read())"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", code, json.dumps(config_of("llama"))]
    assert subprocess.check_output(command, env=environment, text=True).strip() == "False"
