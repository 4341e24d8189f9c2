"""What the process that joins for a service may say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sealring.cli.setup import enrol
from sealring.cli.setup.choices import Wishes
from sealring.mesh.errors import Internal


def test_no_more_is_read_of_it_than_anybody_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as another account, which its owner need not trust."""
    talks = tmp_path / "talks"
    talks.write_text("#!/bin/sh\nexec yes\n")
    talks.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(talks))
    with pytest.raises(Internal):
        enrol.enrol_as(None, tmp_path, {}, Wishes(), "a token")
