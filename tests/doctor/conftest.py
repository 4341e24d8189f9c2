from __future__ import annotations

from pathlib import Path

import pytest

from sealring.doctor.view import View
from sealring.node.settings import NodeSettings


@pytest.fixture
def view(tmp_path: Path) -> View:
    """A node that is in no cluster."""
    return View(NodeSettings(state_dir=tmp_path, name="mini", listen="127.0.0.1:7710"))
