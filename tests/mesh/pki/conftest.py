from __future__ import annotations

from pathlib import Path

import pytest
from leaftest import NOW

from sealring.mesh.pki import ClusterCA


@pytest.fixture
def ca(tmp_path: Path) -> ClusterCA:
    return ClusterCA.create(tmp_path / "ca", "demo", now=NOW)
