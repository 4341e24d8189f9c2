"""The components of a cluster on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.cli.local.cluster import Cluster, _make_whole
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


async def test_who_waits_for_a_start_is_told_each_part_of_it(tmp_path: Path) -> None:
    said: list[str] = []

    class Quick(Cluster):
        names = ("coordinator", "node-0", "gateway", "node-1")

        def write_configs(self) -> None: ...

        def _count_nodes(self) -> str:
            return "2 nodes"

        async def _start_coordinator(self) -> None:
            said.append("(coordinator)")

        async def _enrol_all(self) -> None:
            said.append("(enrolled)")

        async def _or_failure(self, work: Any) -> Any:
            return await work

        async def start_node(self, name: str) -> None:
            said.append(f"({name})")

        async def _start(self, name: str, *_: Any, **__: Any) -> None:
            said.append(f"({name})")

        async def _wait_for_nodes(self) -> None:
            said.append("(online)")

    await Quick(tmp_path / "state", say=said.append).start()
    assert said == [
        "starting the coordinator",
        "(coordinator)",
        "enrolling 2 nodes and a gateway",
        "(enrolled)",
        "starting the nodes and the gateway",
        "(node-0)",
        "(node-1)",
        "(gateway)",
        "(online)",
    ]
