"""What is used of mlx and mlx-lm beyond what they promise: the first test to run with another release.

`pyproject.toml` bounds both from above. Whoever raises a bound finds here what the new release lacks, and
which file relies on it; what they do the tests of those files show.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import mlx

from sealring.node.engine import mlx_lm_import

ROOT = Path(__file__).parents[3]
USED = {
    "mlx.core": {
        "export_to_dot": "transfer",  # the only way to see whether an array was evaluated
        "fast.cuda_kernel": "nvidia",
        "fast.scaled_dot_product_attention": "nvidia",
        "distributed.init": "carrier/ring",
        "set_cache_limit": "device",
        "set_wired_limit": "device",
    },
    "mlx_lm.utils": {"_get_classes": "staging/skeleton", "load_config": "weights", "load_model": "weights"},
    "mlx_lm.models.cache": {
        "make_prompt_cache": "staging/anatomy",
        "CacheList": "staging/quantization",
        "KVCache.update_and_fetch": "staging/anatomy",
        "BatchRotatingKVCache.merge": "caches/window",
        "BatchRotatingKVCache.extend": "caches/window",
        "BatchRotatingKVCache.extract": "caches/window",
        "BatchRotatingKVCache.filter": "caches/window",
        "QuantizedKVCache.update_and_fetch": "caches/quantized",
    },
}
IN_SOURCE = {  # what an instance has; and to import transformers for it would take a second
    "mlx_lm/models/cache.py": {"self.left_padding": "caches/plain", "self._idx": "caches/plain"},
    "mlx_lm/tokenizer_utils.py": {
        "def load(": "text/tokenizer",
        "self._chat_template": "text/tokenizer",
        "self._thinking_kwarg": "text/tokenizer",
        "def has_thinking": "text/tokenizer",
    },
    "mlx_lm/utils.py": {"TokenizerWrapper": "mlx_lm_import", "snapshot_download": "mlx_lm_import"},
}
IN_LIBRARY = {"MLX_RANK": "carrier/ring", "MLX_HOSTFILE": "carrier/ring"}


def lacking(name: str, where: str, by: str) -> str:
    return f"node/.../{by}.py relies on {name} of {where}, which this release lacks"


def test_what_is_used_of_mlx_and_mlx_lm_is_there_and_the_next_releases_are_kept_out() -> None:
    utils = mlx_lm_import.import_utils()
    for module, names in USED.items():
        for name, by in names.items():
            found = utils if module == "mlx_lm.utils" else importlib.import_module(module)
            for part in name.split("."):
                assert hasattr(found, part), lacking(name, module, by)
                found = getattr(found, part)
    assert utils.__file__
    for file, names in IN_SOURCE.items():
        text = (Path(utils.__file__).parents[1] / file).read_text()
        for name, by in names.items():
            assert name in text, lacking(name, file, by)
    (library,) = [path for place in mlx.__path__ for path in Path(place, "lib").glob("libmlx.*")]
    binary = library.read_bytes()
    for name, by in IN_LIBRARY.items():
        assert name.encode() in binary, lacking(name, library.name, by)
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package in ("mlx", "mlx-lm"):
        major, minor = map(int, metadata.version(package).split(".")[:2])
        bounds = [one for one in asked if re.match(rf"{package}(\[cpu\])?>=", one)]
        assert bounds
        assert all(f",<{major}.{minor + 1}" in one for one in bounds), f"{package} has no bound above it"
