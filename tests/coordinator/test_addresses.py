"""A coordinator whose machine gets other addresses: members get them in a roster."""

from __future__ import annotations

from pathlib import Path

import pytest
from patience import until

from sealring.coordinator import main
from sealring.coordinator.init import init
from sealring.coordinator.main import Coordinator
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.clock import wall_clock
from sealring.mesh.member import JoinToken, load_machine_state
from sealring.mesh.roster import Roster, check_roster
from tests.coordinator.conftest import Cluster


class Moving(CoordinatorSettings):
    """Settings of a machine that is at the addresses of a file."""

    def hosts(self) -> tuple[str, ...]:
        return tuple((self.state_dir.parent / "hosts").read_text().split())


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("192.0.2.1 127.0.0.1")
    return file


def newest(coordinator: Coordinator) -> Roster:
    return check_roster(coordinator.publisher.current.envelope, coordinator.keys.root, now=wall_clock())


async def test_members_tokens_and_the_operators_bundle_have_the_addresses_of_now(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "ADDRESS_SECONDS", 0.05)
    settings = Moving(
        state_dir=hosts.parent / "coordinator",
        cluster="test",
        listen="127.0.0.1:0",
        join_listen="127.0.0.1:0",
        standby="10.0.0.9:7700",
        software_identity_allowed=True,
    )
    init(settings)
    coordinator = Coordinator(settings)
    await coordinator.start()
    cluster = Cluster(settings, hosts.parent, coordinator)
    try:
        port, joining = coordinator.port, coordinator.join_port
        coordinator.publisher.publish()
        assert newest(coordinator).coordinators == (
            f"192.0.2.1:{port}",
            f"127.0.0.1:{port}",
            "10.0.0.9:7700",
        )
        version = coordinator.publisher.current.version
        hosts.write_text("192.0.2.7 192.0.2.8")
        await until(lambda: coordinator.publisher.current.version != version)
        assert newest(coordinator).coordinators[:2] == (f"192.0.2.7:{port}", f"192.0.2.8:{port}")
        bundle = settings.state_dir / "operator"
        await until(lambda: load_machine_state(bundle).coordinator == f"192.0.2.7:{port}")
        hosts.write_text("127.0.0.1")
        cluster.connect_operator()
        token = JoinToken.parse(await cluster.token())
        assert token.addresses == (f"127.0.0.1:{joining}",)
        enrolled = await cluster.join("alpha")
        assert enrolled.state.coordinator == f"127.0.0.1:{port}"
        assert enrolled.roster.coordinators[:2] == (f"192.0.2.7:{port}", f"192.0.2.8:{port}")
    finally:
        await cluster.close()
