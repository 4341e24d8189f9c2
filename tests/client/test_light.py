import subprocess
import sys

import pytest
from guarded import modules

HEAVY = modules(
    *("mlx", "mlx_lm", "numpy", "transformers"),
    *(f"sealring.{room}" for room in ("coordinator", "node", "gateway", "doctor", "cli")),
)


def test_the_client_needs_neither_models_nor_servers() -> None:
    code = "import sys, sealring.client; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    loaded = set(done.stdout.split())
    assert "sealring.client" in loaded
    assert not loaded & HEAVY


def test_a_guard_of_what_is_nowhere_fails() -> None:
    with pytest.raises(ModuleNotFoundError, match="coordinator"):
        modules("sealring.mesh", "coordinator")
