"""`deployment plan --kv-bits` against real nodes: what fits, and one clear refusal of a model that cannot."""

import json
import os
import shutil

import pytest
from ringtest import CLUSTER, MODEL

from sealring.mesh.errors import SealringError

pytestmark = CLUSTER


def narrow_model(folder):
    """A random llama whose keys are 16 wide, with the demo model's tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from sealring.node.engine.staging import random_model

    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 64}
    os.chmod(folder / "config.json", 0o644)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(random_model(config, seed=0).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


async def test_a_plan_counts_the_bits_and_refuses_what_cannot_be_quantized(arrangements, tmp_path):
    await arrangements.clear()
    narrow = narrow_model(tmp_path / "narrow")

    async def plan(model, bits):
        spec = {"name": "x", "model": str(model), "context": 512, "kv_bits": bits}
        return (await arrangements.cluster.admin.call("PlanDeployment", spec=spec, seconds=60)).plan

    sizes = [(await plan(MODEL, bits)).rings[0].stages[0].kv_bytes for bits in (0, 8, 4)]
    assert sizes == [9 * size * 512 for size in (1024, 320, 192)]
    assert (await plan(narrow, 0)).profile.layers == 2
    with pytest.raises(SealringError) as caught:
        await plan(narrow, 8)
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "KV_BITS_UNSUPPORTED")
    assert "16 wide" in caught.value.message
    assert caught.value.hint == "deploy it without kv_bits"
