from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.errors import SealringError
from sealring.mesh.member import JoinToken, forget_enrolment
from sealring.mesh.system.addresses import free_port
from sealring.node.join import join
from sealring.node.settings import NodeSettings

NOBODY = f"127.0.0.1:{free_port()}"
TOKEN = JoinToken.generate(bytes(32), [NOBODY]).format()


async def reason(token: str = TOKEN, **fields: Any) -> str:
    with pytest.raises(SealringError) as raised:
        await join(NodeSettings(**{"software_identity_allowed": True, **fields}), token)
    return raised.value.reason


async def test_what_keeps_a_node_from_joining(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    assert await reason(state_dir=folder, software_identity_allowed=False) == "SOFTWARE_IDENTITY"
    assert await reason(state_dir=folder, listen="127.0.0.1:0") == "NO_ADDRESS"
    assert await reason("sr2.typo", state_dir=folder) == "BAD_TOKEN"
    assert await reason(state_dir=folder) == "COORDINATOR_UNREACHABLE"
    party = cluster.party()
    envelope, _ = cluster.roster(members=[party])
    cluster.enrol(party, folder, NOBODY, envelope)
    assert await reason(state_dir=folder) == "ALREADY_ENROLLED"
    forget_enrolment(folder)
    assert await reason(state_dir=folder) == "COORDINATOR_UNREACHABLE"
    assert (folder / "identity.key").stat().st_mode & 0o777 == 0o600
