"""No process of ours has gRPC's handlers of fork(), which run for every child that is started on macOS."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import subprocess, {first}
import grpc
from concurrent.futures import ThreadPoolExecutor
subprocess._USE_VFORK = False  # as on macOS
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
    grpc.channel_ready_future(channel).result(60)
    for _ in range(20):
        subprocess.run(["/bin/sh", "-c", ":"], check=True)
server.stop(0)
"""


@pytest.mark.parametrize(("first", "runs"), [("sealring", False), ("sys", True)])
def test_importing_ours_first_takes_the_handlers_away(first: str, runs: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env=environment | {"GRPC_VERBOSITY": "info"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ("fork() handlers" in done.stderr) == runs, done.stderr
    assert runs or not done.returncode, "with the handlers it may end anyhow, which is why they are off"


def imports(file: Path) -> list[str]:
    """The packages that a file imports at its top level, in order."""
    found = []
    for part in ast.parse(file.read_text()).body:
        if isinstance(part, ast.Import):
            found += [alias.name.partition(".")[0] for alias in part.names]
        elif isinstance(part, ast.ImportFrom):
            found.append((part.module or "").partition(".")[0])
    return found


def test_nothing_imports_grpc_before_ours() -> None:
    """No module of the package can. Tests come after their conftest, and benchmarks after their package."""
    assert "sealring" in imports(ROOT / "tests" / "conftest.py")
    assert "sealring" in imports(ROOT / "bench" / "__init__.py")
    wrong = []
    for folder in ("tests", "examples", ".ci"):
        for file in (ROOT / folder).rglob("*.py"):
            names = imports(file) if "__main__" in file.read_text() else []
            if "grpc" in names and "sealring" not in names[: names.index("grpc")]:
                wrong.append(str(file.relative_to(ROOT)))
    assert wrong == []
