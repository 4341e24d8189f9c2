"""What the dashboard makes of a gateway's metrics and a coordinator's answers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.dashboard import look
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.mesh.errors import PermissionDenied, RosterError
from sealring.testing import PaperCluster
from sealring.v1 import admin_pb2

NOW = 1_800_000_000


async def test_a_cluster_is_told_with_what_its_verified_roster_says() -> None:
    paper = PaperCluster()
    first = paper.roster.members[0]
    answer = SimpleNamespace(root_metadata=paper.root_chain, roster=paper.envelope)

    class Admin:
        address = "h:1"

        async def call(self, method: str) -> Any:
            if method == "GetRoster":
                return answer
            if method == "ListDeployments":
                return admin_pb2.ListDeploymentsResponse()
            nodes = [admin_pb2.Node(id=one, name=one, trust=10) for one in (first.id, "stranger")]
            return admin_pb2.ListNodesResponse(nodes=nodes)

    admin: Any = Admin()
    now = float(paper.roster.issued)
    found = await look.cluster(admin, bytes.fromhex(paper.pin), now)
    assert (found["now"], found["coordinator"], found["root"]) == (now, "h:1", paper.pin)
    assert (found["roster"]["version"], found["roster"]["hash"]) == (
        paper.roster.version,
        paper.roster.hash.hex(),
    )
    assert len(found["roster"]["signers"]) == 1
    told = [(one["listed"], one["attested_at"], one["challenged_at"]) for one in found["nodes"]]
    assert told == [(True, first.attested_at, first.challenged_at), (False, None, None)]
    with pytest.raises(RosterError):
        await look.cluster(admin, bytes(32), now)


async def test_a_member_is_told_on_which_machine_the_join_code_is() -> None:
    class Admin:
        async def call(self, method: str) -> Any:
            raise PermissionDenied("a member may look", reason="MEMBERS_READ", machine="attic")

    admin: Any = Admin()
    found = await look.join_code(admin)
    assert (found["code"], found["at"]) == ("", "attic")


async def test_the_audit_log_is_verified_once_and_then_what_is_new(tmp_path: Path) -> None:
    init(CoordinatorSettings(state_dir=tmp_path, cluster="demo"))
    with closing(Store.open(tmp_path)) as store:

        class Admin:
            def __init__(self) -> None:
                self.read = list[int]()

            async def call(self, method: str, after: int = 0, limit: int = 0, newest: bool = False) -> Any:
                assert method == "ListAuditLog"
                entries = store.audit.entries(after=after, limit=limit)
                self.read += [one.sequence for one in entries] * (not newest)
                return admin_pb2.ListAuditLogResponse(entries=entries)

        def write(count: int) -> None:
            for _ in range(count):
                store.audit.append(NOW, "operator", "do", "thing", {})

        admin: Any = Admin()
        audit = look.Audit(admin)
        write(60)
        for last, read in ((61, [*range(1, 62)]), (61, [61]), (63, [61, 62, 63])):
            found = await audit.look()
            assert (found["trouble"], found["count"]) == ("", last)
            assert [one["sequence"] for one in found["entries"]] == list(range(last, last - 50, -1))
            assert admin.read == read
            admin.read.clear()
            if read == [61]:
                write(2)
        with store.transaction() as connection:
            connection.execute("DELETE FROM messages WHERE kind = 'audit' AND key > 40")
        found = await audit.look()
        assert "audit log" in found["trouble"]
        assert [one["sequence"] for one in found["entries"]] == list(range(40, 0, -1))
