"""A standby of a cluster's coordinator."""

from __future__ import annotations

import asyncio

from patience import until

from sealring.cli.here.settings_files import as_toml
from sealring.cli.local.cluster import LocalCluster
from sealring.coordinator.backup import backup, restore
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.system.addresses import free_port


async def follow(cluster: LocalCluster, listen: str) -> CoordinatorSettings:
    """Starts the standby, as docs/operators.md says; returns when it has followed the coordinator once."""
    host = listen.rpartition(":")[0]
    own = cluster.settings_of("coordinator")
    changed = {
        "state_dir": str(cluster.state_dir / "standby"),
        "listen": listen,
        "join_listen": f"{host}:{free_port()}",
        "standby": own["listen"],
    }
    settings = CoordinatorSettings(**(own | changed))
    copy = cluster.state_dir / "backup"
    await asyncio.to_thread(backup, CoordinatorSettings(**own), copy)
    await asyncio.to_thread(restore, settings, copy, standby=True)
    file = cluster.state_dir / "config" / "standby.toml"
    file.write_bytes(as_toml("coordinator", own | changed))
    database = settings.state_dir / "coordinator.db"
    before = database.stat().st_ino
    await cluster.children.start("standby", ["--config", str(file), "coordinator", "run"])
    await cluster.admin.call("CreateJoinToken", role="ROLE_NODE", note="something to copy")
    await until(lambda: database.stat().st_ino != before, pause=0.1)
    return settings
