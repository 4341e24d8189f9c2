"""When `make clients` makes which environments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import environments


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is made, in order. Nothing is installed; `broken` cannot be."""
    made: list[str] = []

    def make(name: str) -> None:
        made.append(name)
        (tmp_path / name).mkdir(exist_ok=True)
        if name == "broken":
            raise subprocess.CalledProcessError(1, "pip")

    def environment(name: str, *further: Path) -> tuple[object, Path, list[Path]]:
        source = tmp_path / f"{name}.txt"
        source.touch()
        return lambda: make(name), tmp_path / name / ".ready", [source, *further]

    ready = tmp_path / "load" / ".ready"
    table = {"broken": environment("broken"), "load": environment("load"), "vllm": environment("vllm", ready)}
    monkeypatch.setattr(environments, "ALL", table)
    return made


def test_what_failed_is_made_again_and_what_is_made_stays(
    made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    environments.main([])
    assert made == ["broken", "load", "vllm"]
    assert capsys.readouterr().out == "broken was not installed\n"
    environments.main([])
    assert made[3:] == ["broken"]


def test_a_newer_list_is_made_with_what_needs_it(made: list[str], tmp_path: Path) -> None:
    environments.main(["load", "vllm"])
    for name, at in {"load.txt": 3, "load/.ready": 2, "vllm/.ready": 2, "vllm.txt": 1}.items():
        os.utime(tmp_path / name, (at, at))
    environments.main(["load", "vllm"])
    assert made == ["load", "vllm"] * 2


def test_every_list_belongs_to_an_environment() -> None:
    sources = {source for _, _, sources in environments.ALL.values() for source in sources}
    assert {source for source in sources if source.suffix == ".txt"} == set(environments.LISTS.glob("*.txt"))
