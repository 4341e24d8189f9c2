"""Each configuration of a file is checked, whatever becomes of the others."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from bench import stages
from bench.stages import ask_each_apart
from sealring.mesh.errors import Internal, ModelError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
}


def test_all_configurations_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"one": CONFIG, "two": {"model_type": "unheard_of"}}))
    stages.main([str(file)])
    found = json.loads(capsys.readouterr().out)
    assert found["one"] == {
        "model_type": "llama",
        "outcome": "exact",
        "stages": 3,
        "adapter": False,
        "rows_together": True,
        "kv_bits": [],
        "drafts": True,
        "prefixes": "any",
    }
    assert (found["two"]["outcome"], found["two"]["reason"]) == ("refused", "MODEL_TYPE_UNKNOWN")


def module_that(tmp_path: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> str:
    loop = f"for key in sys.argv[1:]:\n    if key == 'bad': {does}\n    print('{{}}', flush=True)\n"
    (tmp_path / "asked.py").write_text(f"import os, sys\n{loop}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "asked"


def test_a_crash_is_that_of_one_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module_that(tmp_path, "os.abort()", monkeypatch)
    found = dict(ask_each_apart(name, [], ["a", "bad", "b"]))
    assert found["a"] == found["b"] == {}
    assert isinstance(found["bad"], ModelError)
    assert found["bad"].reason == "MODEL_CRASHES"
    assert signal.SIGABRT.name in found["bad"].message


def test_a_failure_of_the_check_itself_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module_that(tmp_path, "sys.exit(1)", monkeypatch)
    with pytest.raises(Internal, match="the check of bad failed"):
        list(ask_each_apart(name, [], ["a", "bad", "b"]))
