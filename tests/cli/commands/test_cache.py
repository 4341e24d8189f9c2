"""`sealring cache`: what this machine's node stores of prompts, shown and destroyed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.crypto import SoftwareSigner
from sealring.node.stored.keys import FOLDER, StageIdentity, model_folder, stage_key
from sealring.node.stored.places import Place
from sealring.node.stored.store import Store


@pytest.fixture
def root(home: Path) -> Path:
    """A node's folder with blocks of two models."""
    root = home / FOLDER
    for model, digest in (("org/one", "aa" * 32), ("org/two", "bb" * 32)):
        stage = StageIdentity("cluster", "deployment", digest, (0, 4), 0)
        key = stage_key(root, stage, model, SoftwareSigner.generate())
        store = Store(root, model_folder(root, digest), key, 1 << 20)
        assert store.write(b"scope", Place(bytes(16), 0, 256), memoryview(bytes(1000)))
    return root


def test_what_is_stored_is_listed_by_model(here: Any, home: Path, root: Path) -> None:
    shown = here("cache", "list", "--state-dir", str(home)).out
    assert "org/one" in shown
    assert "org/two" in shown
    found = here("cache", "list", "--json", "--state-dir", str(home)).data
    assert [(one["model"], one["blocks"]) for one in sorted(found, key=lambda one: str(one["model"]))] == [
        ("org/one", 1),
        ("org/two", 1),
    ]


def test_one_model_or_all_is_destroyed_with_its_key(here: Any, home: Path, root: Path) -> None:
    at = ("--state-dir", str(home))
    missing = here("cache", "clear", "org/none", *at)
    assert "[NOT_STORED]" in missing.err
    assert here("cache", "clear", "org/one", *at).status == 0
    assert [one["model"] for one in here("cache", "list", "--json", *at).data] == ["org/two"]
    assert len(list(root.rglob("seed"))) == 1
    assert here("cache", "clear", *at).status == 0
    assert not [path for path in root.iterdir() if path.is_dir()]
    assert here("cache", "list", "--json", *at).data == []


def test_a_node_that_leaves_takes_it_along(here: Any, home: Path, root: Path) -> None:
    (home / "member.json").write_text("{}")
    assert here("node", "leave", "--state-dir", str(home)).status == 0
    assert not [path for path in root.iterdir() if path.is_dir()]
