"""Five kinds of model by the commands that people type: pulled, planned, deployed over three nodes, asked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kernels import share_kernels
from ringtest import CLUSTER, Reference, operate
from small_models import write_model
from trained import write_adapter

from sealring.cli.local.cluster import LocalCluster
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import Manifest

pytestmark = CLUSTER

KINDS = ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_next"]
"""Dense, with experts, with windows, with latent attention, and recurrent in part."""

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes, of which the first has all models."""
    state = tmp_path_factory.mktemp("kinds") / "state"
    archs = json.loads((Path(__file__).parents[1] / "data" / "archs.json").read_bytes())
    for kind in KINDS:
        write_model(state / "node-0" / "models" / kind, archs[kind])
    settings = {"node": {"allow_downloads": True}}
    async with LocalCluster(state, KINDS[0], nodes=3, settings=settings) as cluster:
        share_kernels(state)
        await cluster.start()
        yield cluster


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
async def test_a_kind_is_pulled_planned_deployed_and_served(cluster: LocalCluster, kind: str) -> None:
    """It is on one node, a second pulls all of it, and the third gets its stage's part when it serves."""

    sealring = partial(operate, cluster)
    first, second, third = (cluster.state_dir / f"node-{number}" / "models" / kind for number in range(3))
    await sealring("model", "pull", kind, "--node", "node-1")
    assert Manifest.of(second).digest == Manifest.of(first).digest
    planned = await sealring("deployment", "plan", kind, "--stages", "3")
    assert "node-2 first get" in planned
    name = kind.replace("_", "-")
    await sealring("deploy", kind, "--name", name, "--stages", "3")
    answer = await asyncio.to_thread(_ask, cluster.http_url, name)
    whole = Reference(first).reply(QUESTION, TOKENS)
    shown = re.sub(r"<\|\w+\|>", "", whole.text)  # which random weights like, and no client sees
    assert answer["choices"][0]["message"]["content"] == shown
    assert answer["usage"]["completion_tokens"] == whole.completion_tokens
    note = note_of(third)
    assert note is not None
    assert note.whole == (note.manifest.size < 16 << 20)
    await sealring("deployment", "delete", name)
    await sealring("model", "remove", kind, "--node", "node-1")
    assert not second.exists()


async def test_members_fetch_an_adapter_and_answer_with_the_tuned_model(cluster: LocalCluster) -> None:
    """The model's own folder and the adapter's are on one node; a second deployment has the plain model."""
    sealring, kind = partial(operate, cluster), KINDS[0]
    models = [cluster.state_dir / f"node-{number}" / "models" for number in range(3)]
    adapter = write_adapter(models[0] / "tuned", models[0] / kind, layers=99, strength=0.4)
    await sealring("deploy", kind, "--name", "tuned", "--stages", "3", "--adapter", "tuned")
    answer = await asyncio.to_thread(_ask, cluster.http_url, "tuned")
    whole, plain = (Reference(models[0] / kind, one).reply(QUESTION, TOKENS) for one in (adapter, None))
    shown = re.sub(r"<\|\w+\|>", "", whole.text)
    assert answer["choices"][0]["message"]["content"] == shown
    assert whole.text != plain.text
    assert all((folder / "tuned" / "adapters.safetensors").is_file() for folder in models)
    with pytest.raises(AssertionError, match="served"):
        await sealring("model", "remove", "tuned", "--node", "node-1")
    await sealring("deployment", "delete", "tuned")
    await sealring("model", "remove", "tuned", "--node", "node-1")
    assert not (models[1] / "tuned").exists()


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
