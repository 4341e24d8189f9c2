"""The commands that a demo prints can be typed where it was started."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.local.output import own_command, print_ways
from sealring.v1.admin_pb2 import Deployment
from sealring.v1.model_pb2 import ModelCard


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "some where" / "bin" / "sealring"
    made.parent.mkdir(parents=True)
    made.write_text("#!/bin/sh\necho it is me\n")
    made.chmod(0o755)
    return made


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has this process been started by a name."""
    return lambda name: monkeypatch.setattr(sys, "argv", [name])


@pytest.mark.parametrize("here", [".", "some where", "some where/bin"])
@pytest.mark.parametrize("on_path", [False, True])
def test_a_script_is_named_as_it_is_found(
    script: Path, tmp_path: Path, called: Any, monkeypatch: pytest.MonkeyPatch, here: str, on_path: bool
) -> None:
    monkeypatch.chdir(tmp_path / here)
    called(str(script))
    monkeypatch.setenv("PATH", f"{script.parent if on_path else tmp_path}:/usr/bin:/bin")
    command = own_command()
    assert (command == "sealring") == on_path
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "it is me\n"


def test_a_way_around_is_not_told(script: Path, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    called("../bin/sealring")
    assert own_command() == "./sealring"


def test_another_one_on_the_path_is_not_meant(
    script: Path, called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = script.parent.parent / "sealring"
    shutil.copy(script, other)
    called(str(other))
    monkeypatch.setenv("PATH", str(script.parent))
    assert own_command() != "sealring"


def test_without_a_script_python_is_named(script: Path, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = script.with_name("pytest")
    shutil.copy(script, other)
    script.chmod(0o644)
    for argument in ("/somewhere/cli/__main__.py", str(other), str(script), str(script.with_name("none"))):
        called(argument)
        assert shlex.split(own_command()) == [sys.executable, "-P", "-m", "sealring.cli"]


def test_each_way_to_ask_names_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A demo serves two models where images can be shown, and then no gateway knows which one is meant."""
    cluster: Any = SimpleNamespace(
        name="small", http_url="http://h:1", grpc_address="h:2", operator_bundle=tmp_path, state_dir=tmp_path
    )
    deployment = Deployment()
    print_ways(cluster, deployment)
    shown = capsys.readouterr().out
    assert "\n            HTTP requests that name no temperature have the model's own, or 1" in shown
    assert "chat --gateway h:2 --model small\n" in shown
    assert shown.count('"model": "small"') + shown.count('model="small"') == 3
    deployment.plan.profile.card.MergeFrom(ModelCard(parameters=9, temperature=0.7, top_k=20))
    print_ways(cluster, deployment)
    said = "HTTP requests that set no sampling have temperature 0.7, top_k 20, as the model's makers say"
    assert f"\n            {said}\n" in capsys.readouterr().out
