"""A standby has what the coordinator has, takes over by one command, and the other one is over for good."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
import structlog
from patience import PATIENCE_SECONDS, until

from sealring.coordinator.backup import STANDBY_MARK, backup, restore
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.main import Coordinator, run
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.standby import follow
from sealring.coordinator.standby.copies import Copies, unpacked
from sealring.coordinator.standby.follow import promote, stand_by, write_copy
from sealring.coordinator.standby.terms import tell_predecessor
from sealring.coordinator.store import Store
from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import Ed25519Signer
from sealring.mesh.errors import ConfigError, RosterError, SealringError, Unavailable
from sealring.mesh.member import load_machine_state
from sealring.mesh.roster import check_roster, term_of
from sealring.mesh.rpc import MAX_MESSAGE, from_rpc_error
from sealring.v1 import admin_pb2, admin_pb2_grpc
from tests.coordinator.conftest import Cluster, channel_to


@pytest.fixture
async def standby(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CoordinatorSettings]:
    """One that follows the cluster's coordinator."""
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.05)
    file = cluster.folder / "backup"
    backup(cluster.settings, file)
    settings = cluster.settings.model_copy(update={"state_dir": cluster.folder / "standby"})
    restore(settings, file, standby=True)
    running = asyncio.create_task(stand_by(settings))
    yield settings
    running.cancel()
    await asyncio.wait((running,))


async def until_copied(cluster: Cluster, settings: CoordinatorSettings) -> None:
    copy, store = settings.state_dir / "coordinator.db", cluster.coordinator.store
    await until(lambda: copy.read_bytes() == store.image())


async def until_promoted(settings: CoordinatorSettings) -> None:
    promote(settings)
    await until(lambda: not (settings.state_dir / STANDBY_MARK).exists())


async def test_it_has_what_the_coordinator_has_and_takes_over(
    cluster: Cluster, standby: CoordinatorSettings, start_cluster: Any
) -> None:
    node = await cluster.node("alpha")
    await until_copied(cluster, standby)
    database = standby.state_dir / "coordinator.db"
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    with pytest.raises(ConfigError) as caught:
        Store.open(standby.state_dir)
    assert caught.value.reason == "STATE_IN_USE"
    before = node.roster
    assert before.coordinators == (cluster.coordinator.main_address(),)
    await until_promoted(standby)
    again = await start_cluster(state_dir=standby.state_dir)
    with pytest.raises(ConfigError) as caught:  # the first learns of it, and stops
        async with asyncio.timeout(200):
            await cluster.coordinator.failed()
    assert caught.value.reason == "DEPOSED"
    returned = await again.node("alpha", join=False)
    assert (term_of(before.version), term_of(returned.roster.version)) == (0, 1)
    cluster.coordinator.publisher.publish()  # whatever it still signs
    with pytest.raises(RosterError) as refused:
        returned.reader.accept(cluster.coordinator.publisher.current.envelope)
    assert refused.value.reason == "ROSTER_ROLLBACK"
    assert "took over" in refused.value.hint
    await cluster.close()
    with pytest.raises(ConfigError) as caught:
        Coordinator(cluster.settings)
    assert caught.value.reason == "DEPOSED"


async def test_members_are_told_of_both(start_cluster: Any) -> None:
    cluster = await start_cluster(standby="10.0.0.2:7700")
    node = await cluster.node("alpha")
    assert node.roster.coordinators == (cluster.coordinator.main_address(), "10.0.0.2:7700")


async def test_a_coordinator_stands_down_for_a_later_term_alone(cluster: Cluster) -> None:
    own = cluster.coordinator.publisher.current.envelope
    for roster, reason in ((own, "NO_LATER_TERM"), (b"{}", "ENVELOPE_MALFORMED")):
        with pytest.raises(SealringError) as caught:
            await cluster.call("StandDown", admin_pb2.StandDownRequest(roster=roster))
        assert caught.value.reason == reason
    assert cluster.coordinator.store.get_meta("deposed") is None


async def test_a_copy_is_for_one_question_and_from_the_roster_keys_alone(cluster: Cluster) -> None:
    coordinator = cluster.coordinator
    made = Copies(coordinator.store, coordinator.keys, cluster.settings.state_dir)
    nonce, other = bytes(32), bytes([1]) * 32
    root = coordinator.keys.root
    answer = await made.answer(admin_pb2.CopyStateRequest(nonce=nonce))
    digest, copy = unpacked(answer, nonce, b"", root)
    assert copy is not None
    assert copy.database == coordinator.store.image()
    secret = (cluster.settings.state_dir / "roster.key").read_bytes()
    assert secret not in copy.SerializeToString()
    same = await made.answer(admin_pb2.CopyStateRequest(nonce=nonce, known=digest))
    assert unpacked(same, nonce, digest, root) == (digest, None)
    unsigned = admin_pb2.CopyStateResponse(copy=answer.copy, signature=b"{}")
    cut = admin_pb2.CopyStateResponse(copy=answer.copy[:-9], signature=answer.signature)
    changed = admin_pb2.CopyStateResponse(copy=b"junk", signature=answer.signature)
    for bad, asked in ((answer, other), (unsigned, nonce), (cut, nonce), (changed, nonce)):
        with pytest.raises(SealringError):
            unpacked(bad, asked, b"", root)


async def test_a_standby_is_none_of_a_coordinator_until_it_is_promoted(
    cluster: Cluster, tmp_path: Path, standby: CoordinatorSettings
) -> None:
    with pytest.raises(ConfigError) as caught:
        promote(cluster.settings)
    assert caught.value.reason == "NO_STANDBY"
    await until_copied(cluster, standby)
    known = (standby.state_dir / "coordinator.db").read_bytes()
    await cluster.close()
    serving = asyncio.create_task(run(standby.model_copy(update={"state_dir": tmp_path / "none"})))
    with pytest.raises(ConfigError):  # no folder at all
        await serving
    assert (standby.state_dir / "coordinator.db").read_bytes() == known
    assert ClusterKeys.load(standby, now=wall_clock()).root.cluster == "test"


def test_a_copy_is_written_with_its_modes_and_only_what_has_changed(tmp_path: Path) -> None:
    (tmp_path / "operator").mkdir()
    copy = admin_pb2.StateCopy(
        root_metadata=b"root", authority=b"ca", operator_certificate=b"operator", database=b"data"
    )
    modes = {"root.dsse": 0o644, "ca.pem": 0o644, follow.OPERATOR_CERTIFICATE: 0o600}
    for name in modes:
        (tmp_path / name).write_bytes(b"old")
        (tmp_path / name).chmod(0o640)
    (tmp_path / "ca.pem").write_bytes(b"ca")
    write_copy(tmp_path, copy)
    assert [(tmp_path / name).read_bytes() for name in modes] == [b"root", b"ca", b"operator"]
    assert (tmp_path / "coordinator.db").read_bytes() == b"data"
    found = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in modes}
    assert found == {**modes, "ca.pem": 0o640}, "which nobody has written anew"
    (tmp_path / "root.dsse").unlink()
    with pytest.raises(ConfigError) as caught:
        write_copy(tmp_path, copy)
    assert caught.value.reason == "STATE_UNWRITABLE"


async def test_a_large_state_is_fetched_more_rarely_and_trouble_is_told_once(tmp_path: Path) -> None:
    """A megabyte a second in the long run; what fails is tried again at the next look."""
    came = list[float]()
    lost, gone = Unavailable("no", reason="LOST"), Unavailable("no", reason="GONE")
    results: list[Any] = [3 << 20, 0, lost, lost, gone, 0, lost, 1 << 20]

    class Scripted(follow.Follower):
        async def fetch(self) -> int:
            came.append(now)
            found = results[len(came) - 1]
            if isinstance(found, SealringError):
                raise found
            return int(found)

    settings = CoordinatorSettings(state_dir=tmp_path, cluster="demo")
    init(settings)
    follower = Scripted(settings, clock=wall_clock)
    with structlog.testing.capture_logs() as logs:
        for now in (0.0, 2.9, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 4.5, 4.6):
            if len(came) < len(results):
                await follower.look(now)
    assert came == [0.0, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6]
    told = [(one["event"], one.get("bytes") or one.get("reason")) for one in logs]
    assert told == [
        ("state_copied", 3 << 20),
        ("state_not_copied", "LOST"),
        ("state_not_copied", "GONE"),
        ("state_not_copied", "LOST"),
        ("state_copied", 1 << 20),
    ]


async def test_a_copy_is_made_where_something_has_changed_and_bounded(tmp_path: Path) -> None:
    images: list[bytes] = []
    content = [b"image"]
    store: Any = SimpleNamespace(changes=0, image=lambda: images.append(content[0]) or content[0])
    (tmp_path / "operator").mkdir()
    for name in ("root.dsse", "ca.pem", "operator/tls.pem"):
        (tmp_path / name).write_bytes(name.encode())
    signer = Ed25519Signer.generate()
    root = SimpleNamespace(cluster="demo", roster_keys=(signer.public_key,), roster_threshold=1)
    made = Copies(store, SimpleNamespace(root=root, rosters=(signer,)), tmp_path)  # type: ignore[arg-type]
    ask = admin_pb2.CopyStateRequest(nonce=bytes(32))
    for changes, count in ((0, 1), (0, 1), (1, 2), (1, 2)):
        store.changes = changes
        answer = await made.answer(ask)
        assert len(images) == count
    digest, copy = unpacked(answer, bytes(32), b"", root)  # type: ignore[arg-type]
    assert copy == admin_pb2.StateCopy(
        database=b"image",
        root_metadata=b"root.dsse",
        authority=b"ca.pem",
        operator_certificate=b"operator/tls.pem",
    )
    assert (await made.answer(admin_pb2.CopyStateRequest(nonce=bytes(32), known=digest))).copy == b""
    for size in (0, 31, 33):
        with pytest.raises(SealringError) as caught:
            await made.answer(admin_pb2.CopyStateRequest(nonce=bytes(size)))
        assert caught.value.reason == "BAD_NONCE"
    store.changes += 1
    content[0] = os.urandom(MAX_MESSAGE)  # which nothing makes smaller
    with pytest.raises(SealringError) as caught:
        await made.answer(ask)
    assert caught.value.reason == "STATE_TOO_LARGE"


async def test_copies_are_packed_beside_the_event_loop(tmp_path: Path) -> None:
    """A large state holds up no heartbeat, and is packed once for all who ask meanwhile."""
    packing, packed = threading.Event(), threading.Event()
    images: list[int] = []

    def image() -> bytes:
        images.append(threading.get_ident())
        packing.set()
        assert packed.wait(PATIENCE_SECONDS)
        return b"image"

    (tmp_path / "operator").mkdir()
    for name in ("root.dsse", "ca.pem", "operator/tls.pem"):
        (tmp_path / name).write_bytes(b"")
    keys: Any = SimpleNamespace(root=SimpleNamespace(cluster="demo"), rosters=(Ed25519Signer.generate(),))
    store: Any = SimpleNamespace(changes=0, image=image)
    made = Copies(store, keys, tmp_path)
    ask = admin_pb2.CopyStateRequest(nonce=bytes(32))
    asking = [asyncio.create_task(made.answer(ask)) for _ in range(2)]
    await until(packing.is_set)  # this loop goes on
    packed.set()
    first, second = await asyncio.gather(*asking)
    assert first.copy == second.copy
    assert len(images) == 1


async def test_a_predecessor_that_cannot_be_told_does_not_end_the_coordinator(tmp_path: Path) -> None:
    """Its operator's bundle cannot be read here, as with a disk that is sick; it is tried again."""
    store: Any = SimpleNamespace(get_meta=lambda name: b"192.0.2.1:7700")
    publisher: Any = SimpleNamespace(current=SimpleNamespace(envelope=b""))
    with structlog.testing.capture_logs() as logs:
        telling = asyncio.create_task(tell_predecessor(store, publisher, tmp_path, "192.0.2.2:7700"))
        await asyncio.wait((telling,), timeout=0.05)
        assert not telling.done()
        telling.cancel()
    assert [(one["event"], one["reason"]) for one in logs] == [("predecessor_not_told", "NOT_ENROLLED")]


async def test_the_roster_names_a_standby_that_follows(
    cluster: Cluster, standby: CoordinatorSettings
) -> None:
    """At the address that it gives, which replaces the one before; nothing is set on the coordinator."""
    await until_copied(cluster, standby)
    tls = load_machine_state(standby.state_dir / "operator").tls

    async def follow(address: str) -> str:
        request = admin_pb2.CopyStateRequest(nonce=bytes(32), address=address)
        async with channel_to(cluster.coordinator.main_address(), tls) as channel:
            try:
                await admin_pb2_grpc.AdminStub(channel).CopyState(request, timeout=200)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason
        return ""

    def named() -> tuple[str, ...]:
        publisher = cluster.coordinator.publisher
        envelope = publisher.current.envelope
        return check_roster(envelope, cluster.coordinator.keys.root, now=time.time()).coordinators

    before = named()
    for address in ("10.0.0.2:7700", "10.0.0.3:7700"):
        assert await follow(address) == ""
        assert named() == (*before[:1], address)
    version = cluster.coordinator.publisher.current.version
    assert await follow("10.0.0.3:7700") == ""
    assert cluster.coordinator.publisher.current.version == version, "nothing has changed"
    for bad in ("10.0.0.3", "10.0.0.3:0", ":7700", "a b:1"):
        assert await follow(bad) == "BAD_ADDRESS"
    assert named() == (*before[:1], "10.0.0.3:7700")
