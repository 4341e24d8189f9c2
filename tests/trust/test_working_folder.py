"""Modules that somebody left in the folder that the user works in: none of them may ever run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sealring.cli.local.children import Children

PLANTED = ("cli", "mesh", "node", "gateway", "coordinator", "sealring", "typer", "json", "structlog")
SEALRING = Path(sys.executable).with_name("sealring")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with packages and modules of names that sealring imports; each leaves a mark."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in PLANTED:
        code = f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'ran-{name}').touch()\n"
        (folder / f"{name}.py").write_text(code)
        (folder / name).mkdir()
        for inner in ("__init__.py", "__main__.py"):
            (folder / name / inner).write_text(code)
    monkeypatch.chdir(folder)
    return tmp_path


def marks(folder: Path) -> list[str]:
    return [one.name for one in folder.glob("ran-*")]


async def test_what_demo_and_up_start_is_sealring(planted: Path) -> None:
    children = Children(planted)
    try:
        await children.start("node", ["node", "run", "--no-such-option"])
        await children.child("node").process.wait()
    finally:
        await children.stop()
    assert marks(planted) == []
    assert "No such option: --no-such-option" in (planted / "node.log").read_text()


def test_the_command_is_sealring(planted: Path) -> None:
    done = subprocess.run([SEALRING, "--help"], capture_output=True, text=True, timeout=50, check=True)
    assert marks(planted) == []
    assert "Usage: sealring" in done.stdout
