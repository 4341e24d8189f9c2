"""Five kinds of model by the commands that people type: pulled, planned, deployed over three nodes, asked."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from ringtest import CLUSTER, MODEL, Reference, share_kernels

from sealring.cli.local.cluster import LocalCluster
from sealring.node.engine.staging import random_model
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import Manifest

pytestmark = [*CLUSTER, pytest.mark.sweep]

KINDS = {
    "llama": "dense",
    "qwen3_moe": "experts",
    "gemma3_text": "windows",
    "deepseek_v3": "latent attention",
    "qwen3_next": "recurrent",
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 8


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Random weights, with the demo model's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(random_model(config, seed=3, dtype=mx.float32).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


async def test_five_kinds_are_pulled_planned_deployed_and_served(tmp_path: Path) -> None:
    """Each is on one node, a second pulls all of it, and the third gets its stage's part when it serves."""
    archs = json.loads((Path(__file__).parents[1] / "data" / "archs.json").read_bytes())
    state = tmp_path / "state"
    for kind in KINDS:
        make_model(state / "node-0" / "models" / kind, archs[kind] | {"vocab_size": 1536})
    cluster = LocalCluster(state, "llama", nodes=3, settings={"node": {"allow_downloads": True}})

    async def sealring(*words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sealring.cli", *words),
            env=os.environ | {"SEALRING_CLI_OPERATOR": str(cluster.operator_bundle)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        told, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        return told.decode()

    async with cluster:
        share_kernels(cluster)
        await cluster.start()
        for kind in KINDS:
            whole = state / "node-0" / "models" / kind
            await sealring("model", "pull", kind, "--node", "node-1")
            assert Manifest.of(state / "node-1" / "models" / kind).digest == Manifest.of(whole).digest
            planned = await sealring("deployment", "plan", kind, "--stages", "3")
            assert "node-2 first get" in planned or "node-2 first gets" in planned
            await sealring("deploy", kind, "--stages", "3")
            answer = await asyncio.to_thread(_ask, cluster.http_url, kind)
            told = Reference(whole).reply(QUESTION, TOKENS)
            shown = re.sub(r"<\|\w+\|>", "", told.text)  # which random weights like, and no client sees
            assert answer["choices"][0]["message"]["content"] == shown
            assert answer["usage"]["completion_tokens"] == told.completion_tokens
            note = note_of(state / "node-2" / "models" / kind)
            assert note is not None
            assert note.whole == (note.manifest.size < 24 << 20)
            models = json.loads(await sealring("model", "list", "--json"))
            held = {one["node"]: {each["name"]: each for each in one["models"]} for one in models}
            assert kind in held["node-0"]
            await sealring("deployment", "delete", kind)
            await sealring("model", "remove", kind, "--node", "node-1")


def _ask(url: str, model: str) -> Any:
    import urllib.request

    body = {"model": model, "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)
