"""What the processes of a node have in memory: a module that comes in by accident costs every member."""

import subprocess
import sys
from pathlib import Path

import pytest
from guarded import modules

MODEL = Path(__file__).parents[2] / "examples" / "demo_model" / "model"
PROGRAM = """
import runpy, sys
try:
    runpy.run_module({name!r}, run_name="__main__")  # as `python -m` does; what has arguments asks for them
except (SystemExit, ValueError):  # nothing comes in
    pass
{then}
print(*sorted(sys.modules))
"""
LOAD = """
from sealring.node.engine import folder
from sealring.v1 import engine_pb2
folder.load(engine_pb2.LoadStage(path={path!r}, lo={lo}, hi={hi}, context=256), print)
"""

NOBODYS = modules(
    "transformers",
    "huggingface_hub",
    "mlx_vlm",
    "PIL",
    "typer",
    "click",
    "uvicorn",
    "sealring.gateway",
    "sealring.coordinator",
    "sealring.cli",
)
CHILDRENS = NOBODYS | modules(
    "jinja2",
    "grpc",
    "pydantic",
    "nacl",
    "psutil",
    "rich.pretty",
    "asyncio.events",
    "sealring.mesh.roster",
    "sealring.mesh.crypto.identity",
)
COMPUTES = CHILDRENS | modules("cryptography")
"""Modules that no engine imports to load: its data is open, and carriers have the keys. Head and tail of a
ring that seals rows get one key with an epoch (decision 119)."""
READERS = modules("tokenizers")
"""A head reads prompts, and a tail the vocabulary, for grammars."""
WATCHERS = modules("psutil")
"""A head watches the memory of the processes in which it renders chats and tries grammars out."""
ENGINES = modules("mlx.nn", "mlx_lm", "numpy")
DAEMONS_NEVER = NOBODYS | modules(
    "mlx",
    "mlx_lm",
    "numpy",
    "tokenizers",
    "jinja2",
    "sealring.node.engine",
    "sealring.node.carrier.ring",
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(name: str, then: str = "") -> set[str]:
    """The modules of a process that `python -m NAME` started, once it has done what `then` says."""
    return set(run(PROGRAM.format(name=name, then=then)).splitlines()[-1].split())


def stage(lo: int, hi: int) -> str:
    return LOAD.format(path=str(MODEL), lo=lo, hi=hi)


@pytest.mark.parametrize(
    ("lo", "hi", "needs", "may"),
    [(0, 3, READERS, WATCHERS), (3, 6, set(), set()), (6, 9, READERS, set())],
    ids=["head", "middle", "tail"],
)
def test_an_engine_has_what_its_layers_need(lo: int, hi: int, needs: set[str], may: set[str]) -> None:
    found = loaded("sealring.node.engine.main", stage(lo, hi))
    assert found >= needs | {"mlx_lm.models.llama"}
    assert not found & ((COMPUTES | READERS | modules("mlx_lm.generate")) - needs - may)


def test_a_carrier_has_no_models_and_no_arrays_but_mlx() -> None:
    found = loaded("sealring.node.carrier.main")
    assert "mlx.core" in found
    assert not found & (CHILDRENS | READERS | ENGINES)


def test_a_daemon_has_neither() -> None:
    found = loaded("sealring.node.main")
    assert "grpc" in found
    assert not found & DAEMONS_NEVER, found & DAEMONS_NEVER


@pytest.mark.parametrize(
    "name", ["sealring.node.models.fetch", "sealring.doctor", "sealring.cli.setup.enrol"]
)
def test_what_is_started_for_one_thing_has_nothing_for_terminals(name: str) -> None:
    found = loaded(name)
    assert "structlog" in found
    assert not found & modules("rich.console", "pygments")


def test_whoever_imports_their_code_keeps_what_they_do_without() -> None:
    code = """
import sealring.node.engine.main, sealring.node.carrier.main, sys
print(sys.modules.get("rich", 0) is None)
"""
    assert run(code).split() == ["False"]
