"""The workflows that nobody has run: they parse, and a shell takes what they run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from commands import commands

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"
EXPRESSION = re.compile(r"\$\{\{[^}]*\}\}")


def scripts() -> list[Any]:
    found = []
    for file in sorted(FOLDER.glob("*.yml")):
        for job in yaml.safe_load(file.read_text("utf-8"))["jobs"].values():
            for step in job["steps"]:
                if "run" in step:
                    name = step.get("name", step["run"][:20])
                    found.append(pytest.param(EXPRESSION.sub("x", step["run"]), id=f"{file.stem}: {name}"))
    return found


@pytest.mark.parametrize("script", scripts())
def test_each_step_is_a_script_of_commands_and_options_that_there_are(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    known = commands()
    for line in script.splitlines():
        for words in re.findall(r"bin/sealring ((?:[a-z]|--|[ ])[^|>&]*)", line):
            first, *rest = words.split()
            options = {option for one in known[first].params for option in (*one.opts, *one.secondary_opts)}
            assert {word for word in rest if word.startswith("--")} <= options, words
