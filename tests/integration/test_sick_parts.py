"""Nodes with a sick part, as real processes: a folder that is closed, a dead address, a slow tool."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import macs_tools
from closed import unprivileged
from macs_tools import BOOT, Tools
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, chat, started

from sealring.cli.local.cluster import LocalCluster

pytestmark = CLUSTER
QUESTION = chat("What is the capital of France?")
SLOW = "/bin/sleep 6"
"""Longer than a tool had before a protection was unknown, and shorter than the time for a challenge."""


class Sick(LocalCluster):
    """A cluster whose nodes advertise an address first at which nobody ever answers."""

    dead = ""

    def settings_of(self, name: str) -> dict[str, Any]:
        found = super().settings_of(name)
        return found | ({"advertise": [self.dead, self.address(name)]} if name in self.node_names else {})


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not check():
            await asyncio.sleep(0.2)


def challenged_at(cluster: LocalCluster) -> list[int]:
    """When each node proved itself last, by the coordinator's clock in whole seconds."""
    file = cluster.state_dir / "coordinator" / "coordinator.db"
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as store:
        return [at for (at,) in store.execute("SELECT challenged_at FROM members WHERE role = 'member'")]


async def test_nodes_with_sick_parts_serve(tmp_path: Path) -> None:
    """Their first models folder may not be entered, their first address is dead, and system_profiler takes
    6 s once."""
    tools = Tools(tmp_path / "tools")
    closed, models = tmp_path / "home" / "models", tmp_path / "models"
    closed.mkdir(parents=True)
    shutil.copytree(MODEL, models / "shared")
    (tmp_path / "home").chmod(0)
    settings = {
        "node": {"models": [str(closed), str(models)]},
        "coordinator": {"challenge_interval": 1.0, "challenge_timeout": 30.0, "replace_after": "24h"},
    }
    with socket.create_server(("127.0.0.1", 0)) as dead:
        Sick.dead = f"127.0.0.1:{dead.getsockname()[1]}"
        async with Sick(tmp_path / "state", "shared", nodes=2, settings=settings) as cluster:
            cluster.children.command = (
                *unprivileged(),
                *(sys.executable, macs_tools.__file__, str(tools.root)),
            )
            async with started(cluster, stages=2) as ring:
                assert "Paris" in (await ring.ask(QUESTION, 20)).text

                def said(node: str, event: str) -> int:
                    return cluster.logs[node].read_text(errors="replace").count(event)

                for node in cluster.node_names:
                    await eventually(lambda: said(node, "link_keys_renewed") > 2)  # noqa: B023
                    assert said(node, "model_folder_unreadable") == 1
                assert (await ring.status()).epoch == 1

                await eventually(lambda: tools.asked(BOOT) == 2)
                since = max(challenged_at(cluster))
                await eventually(lambda: min(challenged_at(cluster)) > since)
                tools.once(BOOT, SLOW)
                await cluster.children.kill_one("node-0")
                await cluster.start_one("node-0")
                await eventually(lambda: tools.asked(BOOT) == 3)
                since = max(challenged_at(cluster))
                await eventually(lambda: min(challenged_at(cluster)) > since + 1)
                await ring.serving()
                assert "Paris" in (await ring.reply(QUESTION, 20)).text
                assert said("coordinator", "member_failed_challenge") == 0
