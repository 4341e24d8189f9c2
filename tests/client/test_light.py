import subprocess
import sys


def test_the_client_needs_neither_models_nor_servers() -> None:
    code = """
import sys
import sealring.client
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = {"mlx", "mlx_lm", "numpy", "transformers", "coordinator", "node", "gateway", "doctor", "cli"}
print(*sorted(loaded & heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == []
