"""The components of a cluster on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.cli.local.cluster import _make_whole
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import AlreadyExists
from sealring.mesh.member.state import is_enrolled


class Crash(BaseException):
    pass


def crash_after_the_keys(settings: CoordinatorSettings) -> None:
    settings.state_dir.mkdir(parents=True)
    (settings.state_dir / "root.key").write_text("a key")
    raise Crash


def test_a_coordinator_that_a_crash_left_half_made_is_made_anew(tmp_path: Path) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path / "coordinator")
    with pytest.raises(Crash):
        _make_whole(settings, crash_after_the_keys)
    assert not settings.state_dir.exists()
    settings.state_dir.mkdir()
    _make_whole(settings, init)
    assert is_enrolled(settings.state_dir / "operator")
    assert [one.name for one in tmp_path.iterdir()] == ["coordinator"]
    with pytest.raises(AlreadyExists):
        _make_whole(settings, init)
