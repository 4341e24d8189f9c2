"""Making the state, starting and stopping the process, and what bad settings and states get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.main import Coordinator, run
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.mesh.clock import wall_clock
from sealring.mesh.errors import AlreadyExists, ConfigError, Unavailable
from sealring.mesh.member import fetch_root, load_machine_state
from sealring.mesh.pki import Role
from sealring.mesh.system.addresses import free_port
from tests.coordinator.conftest import Cluster, channel_to


def settings(tmp_path: Path, **changes: Any) -> CoordinatorSettings:
    values: dict[str, Any] = {
        "state_dir": tmp_path / "c",
        "listen": "127.0.0.1:0",
        "join_listen": "127.0.0.1:0",
    }
    return CoordinatorSettings(**(values | changes))


def test_init_makes_a_private_state_with_an_operator_bundle(tmp_path: Path) -> None:
    made = settings(tmp_path, cluster="attic", listen="127.0.0.1:7700")
    init(made)
    bundle = load_machine_state(made.state_dir / "operator")
    assert (bundle.peer.role, bundle.peer.cluster, bundle.coordinator) == (
        Role.OPERATOR,
        "attic",
        "127.0.0.1:7700",
    )
    for path in made.state_dir.rglob("*"):
        allowed = 0o700 if path.is_dir() else 0o644 if path.name in ("ca.pem", "root.dsse") else 0o600
        assert stat.S_IMODE(path.stat().st_mode) in (allowed, 0o600), path
    keys = ClusterKeys.load(made, now=wall_clock())
    assert bundle.root_sha256 == keys.pin == keys.root.fingerprint


def test_init_makes_up_a_name_and_refuses_to_run_twice(tmp_path: Path) -> None:
    init(settings(tmp_path))
    cluster = ClusterKeys.load(settings(tmp_path), now=wall_clock()).root.cluster
    assert cluster.startswith("ring-")
    with pytest.raises(AlreadyExists) as caught:
        init(settings(tmp_path))
    assert caught.value.reason == "STATE_EXISTS"


def test_init_leaves_a_half_made_state_alone(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "root.key").write_bytes(b"precious")
    with pytest.raises(AlreadyExists):
        init(settings(tmp_path))
    assert (tmp_path / "c" / "root.key").read_bytes() == b"precious"


def test_init_on_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        init(settings(tmp_path))
    assert caught.value.reason == "STATE_UNWRITABLE"


def reason_to_start(made: CoordinatorSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        Coordinator(made)
    return caught.value.reason


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("roster.key", None, "STATE_MISSING"),
        ("roster.key", b"short", "BAD_KEY"),
        ("ca.pem", None, "STATE_MISSING"),
        ("ca.key", b"nonsense", "BAD_CA"),
        ("root.dsse", b"nonsense", "STATE_CORRUPT"),
        ("root.dsse", b"", "STATE_CORRUPT"),
        ("coordinator.db", b"nonsense" * 1000, "STATE_CORRUPT"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    made = settings(tmp_path)
    init(made)
    path = made.state_dir / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(Exception) as caught:
        Coordinator(made)
    assert getattr(caught.value, "reason", None) == reason
    if name != "coordinator.db":
        Store.open(made.state_dir).close()


def test_keys_of_another_cluster_are_refused(tmp_path: Path) -> None:
    made, other = settings(tmp_path), settings(tmp_path, state_dir=tmp_path / "other")
    init(made)
    init(other)
    (made.state_dir / "roster.key").write_bytes((other.state_dir / "roster.key").read_bytes())
    assert reason_to_start(made) == "STATE_CORRUPT"


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made = settings(tmp_path)
    init(made)
    (made.state_dir / "roster.key").chmod(0o644)
    assert reason_to_start(made) == "SECRET_FILE_UNSAFE"


async def test_a_port_in_use_is_one_clear_error_and_frees_the_state(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    made = settings(tmp_path, listen=f"127.0.0.1:{port}")
    init(made)
    with pytest.raises(ConfigError) as caught:
        await run(made)
    assert caught.value.reason == "CANNOT_LISTEN"
    Store.open(made.state_dir).close()
    taken.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_runs_until_a_signal_and_stops_cleanly(tmp_path: Path, number: int) -> None:
    made = settings(tmp_path, listen=f"127.0.0.1:{free_port()}", join_listen=f"127.0.0.1:{free_port()}")
    init(made)
    pin = load_machine_state(made.state_dir / "operator").root_sha256
    running = asyncio.create_task(run(made))
    port = int(made.join_listen.rpartition(":")[2])
    async with asyncio.timeout(200):
        while not running.done():
            with contextlib.suppress(Unavailable):  # nothing listens yet
                root = await fetch_root("127.0.0.1", port, pin, deadline=30)
                break
            await asyncio.sleep(0.05)
        assert not running.done()
        assert root.version == 1
        os.kill(os.getpid(), number)
        await running
    Store.open(made.state_dir).close()


async def test_health_is_served_on_both_ports(cluster: Cluster) -> None:
    bundle = load_machine_state(cluster.settings.state_dir / "operator")
    for port in (cluster.coordinator.port, cluster.coordinator.join_port):
        async with channel_to(f"127.0.0.1:{port}", bundle.tls) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=100
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_operator_bundle_follows_the_address(cluster: Cluster) -> None:
    bundle = load_machine_state(cluster.settings.state_dir / "operator")
    assert bundle.coordinator == cluster.coordinator.main_address()


async def test_a_part_that_fails_ends_the_process(
    start_cluster: Callable[..., Awaitable[Cluster]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Coordinator, "rotate_certificates", broken)
    cluster = await start_cluster()
    with pytest.raises(OSError, match="no space"):
        async with asyncio.timeout(200):
            await cluster.coordinator.failed()
    await cluster.close()
