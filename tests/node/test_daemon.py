import asyncio
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from mesh.memberstate import load_member_state
from node.daemon import Daemon
from node.settings import NodeSettings
from sealring.v1 import membership_pb2


async def test_a_task_that_fails_is_told_of(cluster: Any, tmp_path: Path) -> None:
    """Nobody waits for what the coordinator's messages begin."""
    party = cluster.party()
    envelope, _ = cluster.roster(members=[party])
    cluster.enrol(party, tmp_path, "127.0.0.1:1", envelope)
    chosen = NodeSettings(state_dir=tmp_path, name="n", listen="127.0.0.1:1")
    daemon: Any = Daemon(chosen, load_member_state(tmp_path), party.signer)

    async def fails(challenge: membership_pb2.Challenge) -> None:
        raise ValueError("a fault")

    daemon._prover.answer = fails
    with capture_logs() as logs:
        await daemon.from_coordinator(
            membership_pb2.CoordinatorMessage(challenge=membership_pb2.Challenge(nonce=b"n"))
        )
        async with asyncio.timeout(10):
            while daemon._tasks:
                await asyncio.sleep(0)
    assert [(one["event"], type(one["exc_info"])) for one in logs] == [
        ("a task of the daemon failed", ValueError)
    ]
