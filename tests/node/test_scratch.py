"""Every process that runs mlx has a folder of its own for the code that mlx compiles and loads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sealring.mesh.errors import ConfigError
from sealring.node import scratch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "MLX_PTX_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def claimed(monkeypatch: pytest.MonkeyPatch, shared: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(shared))
    scratch.claim()
    folder = Path(os.environ["TMPDIR"])
    assert Path(os.environ["MLX_PTX_CACHE_DIR"]).parent == folder
    assert scratch.is_private(folder)
    return folder


def test_a_private_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert claimed(monkeypatch, tmp_path) == tmp_path


def test_in_a_shared_folder_there_is_one_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    first = claimed(monkeypatch, tmp_path)
    assert first == tmp_path / f"sealring-{os.geteuid()}"
    assert first.stat().st_mode & 0o777 == 0o700
    assert claimed(monkeypatch, tmp_path) == first


@pytest.mark.parametrize("planted", ["open folder", "link", "link to nothing", "file"])
def test_what_somebody_put_in_its_place_is_not_used(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    shared.mkdir()
    shared.chmod(0o1777)
    theirs.mkdir(mode=0o700)
    name = shared / f"sealring-{os.geteuid()}"
    if planted == "link":
        name.symlink_to(theirs)
    elif planted == "link to nothing":
        name.symlink_to(theirs / "nothing")
    elif planted == "file":
        name.touch()
    else:
        name.mkdir()
        name.chmod(0o777)
    found = claimed(monkeypatch, shared)
    assert found not in (name, theirs)
    assert found.parent == shared


def test_a_folder_that_others_can_rearrange_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        scratch.claim()
    assert caught.value.reason == "NO_PRIVATE_FOLDER"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "module",
    [
        "sealring.node.engine.check",
        "sealring.node.engine.profile",
        "sealring.node.carrier.ring",
        "bench.baseline",
    ],
)
def test_mlx_finds_a_private_folder_when_it_is_imported(module: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    code = (
        "import os, sys, tempfile\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mlx.core': print(os.environ['TMPDIR'], file=sys.__stdout__)\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"import {module}\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / f"sealring-{os.geteuid()}")]


CLAIMING = [Path("node/engine"), Path("node/carrier"), Path("bench")]
SCRIPTS = [
    Path("examples/quantise.py"),
    Path("examples/demo_model/evaluate.py"),
    Path("examples/seeing_model/evaluate.py"),
    Path("examples/seeing_model/train.py"),
]
"""Not in a package: each imports one of these first."""


def imports_of(source: bytes) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module or "")
    return found


def test_nothing_imports_mlx_outside_packages_that_claim_a_folder() -> None:
    for package in CLAIMING:
        body = ast.parse((ROOT / package / "__init__.py").read_bytes()).body
        assert any(isinstance(line, ast.Expr) and ast.unparse(line) == "scratch.claim()" for line in body)
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    users = []
    for name in map(Path, names):
        if name.parts[0] == "tests" or not (ROOT / name).is_file():
            continue
        if b"mlx" not in (source := (ROOT / name).read_bytes()):
            continue
        imports = [found.partition(".")[0] for found in imports_of(source)]
        if {"mlx", "mlx_lm"} & set(imports):
            users.append(name)
            if name in SCRIPTS:
                assert imports.index("sealring") < imports.index("mlx")
            else:
                assert any(package in name.parents for package in CLAIMING), name
    assert len(users) > 20
