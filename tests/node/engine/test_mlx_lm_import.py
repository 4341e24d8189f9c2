from __future__ import annotations

import subprocess
import sys

from guarded import modules


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_models_and_loading_without_the_text_side() -> None:
    text = sorted(modules("transformers", "huggingface_hub", "mlx_lm.generate", "numpy"))
    code = f"""
import sys

from sealring.node.engine import mlx_lm_import
from sealring.node.engine import weights
from sealring.node.engine import staging
from sealring.node.engine import profile
utils = mlx_lm_import.import_utils()
import mlx_lm.models.llama, mlx_lm.models.cache
assert utils.load_model and mlx_lm.models.llama.Model
print(sorted(set({text}) & set(sys.modules)))
"""
    assert run(code) == "[]"


def test_the_real_package_on_demand() -> None:
    """Without the limits on open files that mlx_lm would set: it would not load where the hard limit is below
    its own."""
    code = """
import resource
real = resource.setrlimit
real(resource.RLIMIT_NOFILE, (700, 3000))
from sealring.node.engine import mlx_lm_import
light = mlx_lm_import.import_utils()
from mlx_lm.models.llama import Model
import mlx_lm
assert mlx_lm_import.import_whole() is mlx_lm
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
import mlx_lm.utils, mlx_lm.models.llama, huggingface_hub
assert mlx_lm.utils is not light and mlx_lm.utils.TokenizerWrapper is TokenizerWrapper
assert mlx_lm.utils.snapshot_download is huggingface_hub.snapshot_download
assert mlx_lm.models.llama.Model is Model
assert mlx_lm_import.import_utils() is mlx_lm.utils
assert resource.setrlimit is real
import sys, sealring.node.engine
del sys.modules[mlx_lm_import.__name__], sealring.node.engine.mlx_lm_import
from sealring.node.engine import mlx_lm_import as again  # which leaves what is imported alone
again.install()
assert again is not mlx_lm_import and again.import_utils() is mlx_lm.utils
print(load.__module__, resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert run(code) == "mlx_lm.utils (700, 3000)"


def test_a_release_that_asks_for_more_is_imported_whole() -> None:
    code = """
from types import ModuleType
from sealring.node.engine import mlx_lm_import
class Bare(ModuleType):
    __slots__ = ()
    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
mlx_lm_import.ModuleType = lambda name: Bare(name)
utils = mlx_lm_import.import_utils()
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper
assert utils is mlx_lm.utils and utils.TokenizerWrapper is TokenizerWrapper
print(utils.load_model.__module__)
"""
    assert run(code) == "mlx_lm.utils"
