"""A model's code runs in a process of its own; if it ends, an error says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.mesh.errors import FailedPrecondition, Internal, ModelError
from sealring.node.engine import ask_apart

SCRIPTS = {
    "crashes": "import os\nos.abort()\n",
    "breaks_off": "raise ValueError('what broke')\n",
    "tells": (
        "import sys\nfrom sealring.node.engine.apart import answer\n"
        "def work():\n    print('a library says hello')\n    return {'asked': sys.argv[1:]}\n"
        "sys.exit(answer(work))\n"
    ),
    "finds": (
        "import os, sys\nfrom sealring.node.engine.apart import answer, answers\n"
        "found = lambda: {'tf32': os.environ.get('MLX_ENABLE_TF32')}\n"
        "sys.exit(answers([found] * 2) if sys.argv[1:] else answer(found))\n"
    ),
    "refuses": (
        "import sys\nfrom sealring.mesh.errors import ModelError\n"
        "from sealring.node.engine.apart import answer\n"
        "def work():\n    raise ModelError('no', reason='WHY', hint='do', param='path')\n"
        "sys.exit(answer(work))\n"
    ),
}


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_an_answer_comes_whatever_libraries_print() -> None:
    assert ask_apart("tells", ["one", "two"]) == {"asked": ["one", "two"]}


def test_a_crash_is_told() -> None:
    with pytest.raises(ModelError) as caught:
        ask_apart("crashes", [])
    assert caught.value.reason == "MODEL_CRASHES"
    assert "SIGABRT" in caught.value.message


def test_an_error_of_our_own_comes_over_whole() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        ask_apart("refuses", [])
    error = caught.value
    assert (error.code, error.reason, error.message, error.hint) == (ModelError.code, "WHY", "no", "do")
    assert error.metadata == {"param": "path"}


def test_any_other_end_is_a_fault_of_ours() -> None:
    with pytest.raises(Internal) as caught:
        ask_apart("breaks_off", [])
    assert "ValueError: what broke" in caught.value.message


def test_mlx_multiplies_exactly_where_results_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    assert ask_apart("finds", []) == {"tf32": "0"}
