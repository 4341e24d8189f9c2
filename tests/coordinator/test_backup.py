"""Backups: what they hold, what a restore takes, and that members follow who goes on from one."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
import storekit

from sealring.coordinator.backup import backup, recover, restore
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.mesh.errors import AlreadyExists, ConfigError, InvalidInput
from sealring.mesh.roster import Equivocation, RosterReader, RosterStateFile
from tests.coordinator.conftest import Cluster

NOW = 1_800_000_000
DAY = 24 * 3600


class Site:
    """Coordinators of one cluster, one after the other, and a reader that follows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = float(NOW)
        self.alarms: list[Equivocation] = []
        self.file = folder / "backup.tar"
        self.settings = self.at("first")
        init(self.settings, clock=self.clock)
        root = ClusterKeys.load(self.settings, now=NOW).root
        RosterStateFile(folder / "roster-state.json").create(root.cluster)
        self.reader = RosterReader(
            root, folder / "roster-state.json", None, clock=self.clock, on_equivocation=self.alarms.append
        )

    def at(self, name: str) -> CoordinatorSettings:
        return CoordinatorSettings(state_dir=self.folder / name, cluster="demo")

    def clock(self) -> float:
        return self.now

    def run(self, settings: CoordinatorSettings, *, rosters: int) -> int:
        """A run of a coordinator that signs `rosters` rosters, and an epoch with each; the last epoch."""
        store = Store.open(settings.state_dir)
        keys = ClusterKeys.load(settings, now=self.now)
        publisher = RosterPublisher(store, keys, settings, clock=self.clock)
        epoch = 0
        for _ in range(rosters):
            publisher.publish()
            self.reader.accept(publisher.current.envelope)
            epoch = store.deployments.next_epoch("demo-0")
        store.close()
        return epoch


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("signed", [0, 3])
def test_readers_follow_who_goes_on_from_a_backup_and_no_alarm_is_raised(site: Site, signed: int) -> None:
    site.run(site.settings, rosters=signed)
    backup(site.settings, site.file, clock=site.clock)
    epoch = site.run(site.settings, rosters=40)
    for days, name in enumerate(("second", "third"), 1):  # the same backup twice
        site.now = NOW + days * DAY
        restore(site.at(name), site.file, clock=site.clock)
        newer = site.run(site.at(name), rosters=40)
        assert newer > epoch + 40, "no epoch's number is used again"
        epoch = newer
    assert site.alarms == []


def test_a_copy_put_back_by_hand_goes_on_after_recover(site: Site) -> None:
    site.run(site.settings, rosters=3)
    database = site.settings.state_dir / "coordinator.db"
    older = database.read_bytes()
    site.run(site.settings, rosters=40)
    database.write_bytes(older)
    recover(site.settings, clock=site.clock)
    site.run(site.settings, rosters=1)
    assert site.alarms == []


def test_a_new_rings_epochs_begin_above_what_was_skipped(site: Site) -> None:
    """Its deployment may have been made after the backup, and made again now."""
    epoch = site.run(site.settings, rosters=5)
    recover(site.settings, clock=site.clock)
    store = Store.open(site.settings.state_dir)
    assert store.deployments.next_epoch("other-0") > epoch
    store.close()


@pytest.mark.parametrize(
    ("seconds", "instead_of", "skipped"),
    [
        (0, "", 1024),
        (-9, "", 1024),
        (1, "", 1040),
        (100 * DAY, "h:1", 138_241_024),
        (5 * 365 * DAY, "", 1 << 31),
    ],
)
def test_so_many_numbers_are_skipped_and_the_log_says_so(
    site: Site, seconds: float, instead_of: str, skipped: int
) -> None:
    """Sixteen a second since the newest roster, and some more; a new term where it takes another's place."""
    site.run(site.settings, rosters=1)
    site.now += seconds
    settings = site.settings
    before = Store.open(settings.state_dir)
    epoch, version = before.deployments.next_epoch("demo-0"), before.rosters.next_version()
    before.close()
    recover(settings, instead_of=instead_of, clock=site.clock)
    store = Store.open(settings.state_dir)
    (entry,) = [one for one in store.audit.entries(after=0, limit=100) if one.action == "recover"]
    assert (entry.at, entry.actor, entry.subject) == (int(site.now), "coordinator", "demo")
    assert entry.details["skipped"] == str(skipped)
    assert ("term" in entry.details) == bool(instead_of)
    assert store.get_meta("predecessor") == (instead_of.encode() or None)
    assert store.deployments.next_epoch("demo-0") == epoch + skipped + 1
    assert store.rosters.next_version() - version >= skipped
    store.close()


def test_join_tokens_of_a_backup_are_worth_nothing(site: Site) -> None:
    store = Store.open(site.settings.state_dir)
    store.tokens.add(storekit.token("t"), b"secret")
    store.close()
    recover(site.settings, clock=site.clock)
    store = Store.open(site.settings.state_dir)
    assert store.tokens.open(now=NOW) == []
    store.close()


def test_a_backup_is_private_whole_and_never_overwritten(site: Site) -> None:
    live = Store.open(site.settings.state_dir)  # the coordinator runs
    backup(site.settings, site.file, clock=site.clock)
    live.close()
    assert stat.S_IMODE(site.file.stat().st_mode) == 0o600
    with tarfile.open(site.file) as archive:
        names = set(archive.getnames())
    assert {"ca.key", "ca.pem", "roster.key", "root.dsse", "coordinator.db", "operator/tls.key"} <= names
    assert "root.key" not in names
    with pytest.raises(AlreadyExists):
        backup(site.settings, site.file, clock=site.clock)


def test_a_backup_is_on_the_disk_when_it_is_done(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync

    def noting(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("sealring.coordinator.backup.os.fsync", noting)
    backup(site.settings, site.file, clock=site.clock)
    assert site.file.stat().st_ino in synced


def test_where_there_is_no_state_there_is_nothing_to_back_up(site: Site) -> None:
    (site.settings.state_dir / "coordinator.db").unlink()
    with pytest.raises(ConfigError) as caught:
        backup(site.settings, site.file, clock=site.clock)
    assert caught.value.reason == "STATE_MISSING"
    assert not site.file.exists()


def test_a_backup_that_fails_leaves_no_file(site: Site) -> None:
    database = site.settings.state_dir / "coordinator.db"
    database.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError) as caught:
        backup(site.settings, site.file, clock=site.clock)
    assert caught.value.reason == "STATE_CORRUPT"
    assert not site.file.exists()
    with pytest.raises(ConfigError) as caught:
        backup(site.settings, site.folder / "none" / "backup.tar", clock=site.clock)
    assert caught.value.reason == "STATE_UNWRITABLE"


@pytest.mark.parametrize("where", ["second", "second/.restoring"])
def test_a_restore_into_what_cannot_be_written_says_so(site: Site, where: str) -> None:
    backup(site.settings, site.file, clock=site.clock)
    blocked = site.folder / where
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file in the way")
    with pytest.raises(ConfigError) as caught:
        restore(site.at("second"), site.file, clock=site.clock)
    assert caught.value.reason == "STATE_UNWRITABLE"


def test_a_restore_over_what_an_earlier_one_left_takes_the_new_one(site: Site) -> None:
    backup(site.settings, site.file, clock=site.clock)
    leftover = site.folder / "second" / ".restoring" / "ca.key"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("of one that was killed")
    restore(site.at("second"), site.file, clock=site.clock)
    assert (site.folder / "second" / "ca.key").read_bytes() == (site.folder / "first" / "ca.key").read_bytes()
    assert not leftover.parent.exists()
    assert stat.S_IMODE((site.folder / "second" / "operator").stat().st_mode) == 0o700


def test_a_restore_overwrites_nothing(site: Site) -> None:
    backup(site.settings, site.file, clock=site.clock)
    with pytest.raises(AlreadyExists) as caught:
        restore(site.settings, site.file, clock=site.clock)
    assert caught.value.reason == "STATE_EXISTS"


def archive(path: Path, *entries: tuple[str, bytes], link: str = "") -> None:
    with tarfile.open(path, "w") as made:
        for name, data in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if link:
                entry.type, entry.linkname, entry.size = tarfile.SYMTYPE, link, 0
            made.addfile(entry, io.BytesIO(data))


def promise(name: str, size: int) -> bytes:
    """The beginning of an archive of one file of `size` bytes."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf() + bytes(512)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("junk", ""),
        ("none", "there is no such file"),
        ("other", "it holds 'root.key'"),
        ("long", "it holds '" + "n" * 64 + "'"),
        ("outside", "it holds '../ca.key'"),
        ("link", "it holds 'ca.key'"),
        ("twice", "it holds 'ca.key'"),
        ("huge", "it holds 'ca.key'"),
        ("cut off", "unexpected end of data"),
        ("lacking", "it lacks ca.pem, roster.key, root.dsse, coordinator.db"),
    ],
)
def test_what_is_no_backup_leaves_nothing_behind(site: Site, what: str, why: str) -> None:
    if what == "junk":
        site.file.write_bytes(b"\x00junk" * 1000)
    elif what == "other":
        archive(site.file, ("root.key", bytes(32)))
    elif what == "outside":
        archive(site.file, ("../ca.key", b"x"))
    elif what == "link":
        archive(site.file, ("ca.key", b""), link="/etc/passwd")
    elif what == "twice":
        archive(site.file, ("ca.key", b"x"), ("ca.key", b"y"))
    elif what == "long":
        archive(site.file, ("n" * 80, b"x"))
    elif what in ("huge", "cut off"):
        site.file.write_bytes(promise("ca.key", (1 << 32) + (what == "huge")))
    elif what == "lacking":
        archive(site.file, ("ca.key", b"x"))
    with pytest.raises(InvalidInput) as caught:
        restore(site.at("second"), site.file, clock=site.clock)
    assert caught.value.reason == "BAD_BACKUP"
    assert caught.value.message.startswith(f"{site.file} is no backup of a coordinator: {why}")
    assert list((site.folder / "second").iterdir()) == []


def test_a_backup_of_two_clusters_is_refused(site: Site) -> None:
    backup(site.settings, site.file, clock=site.clock)
    with tarfile.open(site.file) as whole:
        files = [(name, whole.extractfile(name).read()) for name in whole.getnames()]  # type: ignore[union-attr]
    mixed = [(name, bytes(32) if name == "roster.key" else data) for name, data in files]
    archive(site.folder / "mixed.tar", *mixed)
    with pytest.raises(ConfigError) as caught:
        restore(site.at("second"), site.folder / "mixed.tar", clock=site.clock)
    assert caught.value.reason == "STATE_CORRUPT"
    assert not (site.folder / "second" / "coordinator.db").exists()


async def test_nodes_come_back_to_a_restored_coordinator(cluster: Cluster, start_cluster: Any) -> None:
    await cluster.join("alpha")
    file = cluster.folder / "backup.tar"
    backup(cluster.settings, file)
    node = await cluster.node("alpha", join=False)
    for _ in range(3):
        cluster.coordinator.publisher.publish()
    newest = cluster.coordinator.publisher.current.version
    await node.wait_for("roster", lambda _: node.roster.version == newest)
    await cluster.close()
    second = cluster.folder / "second"
    restore(cluster.settings.model_copy(update={"state_dir": second}), file)
    again = await start_cluster(state_dir=second)
    returned = await again.node("alpha", join=False)
    assert returned.roster.version > newest
    assert again.coordinator.sessions.find(returned.id) is not None
