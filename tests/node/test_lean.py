import subprocess
import sys

import pytest

RUN = """
import atexit, runpy, sys
atexit.register(lambda: print(sorted(name for name in sys.modules if name.startswith("rich."))))
sys.argv = ["x", "--help"]
runpy.run_module(sys.stdin.read(), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["node.engine.main", "node.carrier.main"])
def test_children_do_without_rich(name):
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=name, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_whoever_imports_their_code_keeps_it():
    code = "import node.engine.main, node.carrier.main, sys; print(sys.modules.get('rich', 0) is None)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "False"
