"""A cluster under root keys that are kept elsewhere, and rosters that take the signatures of several keys."""

from __future__ import annotations

import dataclasses
import re
import resource
import shutil
import stat
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sealring.coordinator.init import ROOT_DRAFT, complete, init, new_operator, prepare
from sealring.coordinator.keys import ClusterKeys, extend_root
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.coordinator.store.integrity import check_stored
from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import Ed25519Signer, encode_envelope, key_id, parse_envelope
from sealring.mesh.errors import AlreadyExists, ConfigError, InvalidInput, RosterError, SealringError
from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import (
    PAYLOAD_TYPE,
    ClusterCA,
    check_root_times,
    cosign_root,
    decode_chain,
    draft_root,
    encode_chain,
    follow_root,
    read_root_draft,
    root_fingerprint,
    verify_root_chain,
)
from sealring.mesh.roster import MAX_PAYLOAD_BYTES, check_roster
from sealring.mesh.roster import PAYLOAD_TYPE as ROSTER_TYPE
from tests.coordinator.conftest import Cluster

SEEDS = [bytes([number]) * 32 for number in (1, 2, 3)]
HOLDERS = [Ed25519Signer(seed) for seed in SEEDS]


def settings(folder: Path, **changes: Any) -> CoordinatorSettings:
    values: dict[str, Any] = {"state_dir": folder / "coordinator", "cluster": "test"}
    return CoordinatorSettings(**(values | changes))


def drafted(made: CoordinatorSettings, *, threshold: int = 2, roster_threshold: int = 1) -> bytes:
    keys = [holder.public_key for holder in HOLDERS]
    return prepare(made, keys, threshold, roster_threshold=roster_threshold)


def signed(draft: bytes, *holders: Ed25519Signer) -> bytes:
    for holder in holders:
        draft = cosign_root(draft, holder)
    return draft


def test_a_cluster_is_made_under_a_root_that_is_elsewhere(tmp_path: Path) -> None:
    made = settings(tmp_path)
    draft = drafted(made)
    assert not (made.state_dir / "coordinator.db").exists()
    complete(made, signed(draft, *HOLDERS[:2]))
    keys = ClusterKeys.load(made, now=wall_clock())
    assert (keys.root.root_threshold, len(keys.root.root_keys)) == (2, 3)
    assert keys.pin == root_fingerprint([holder.public_key for holder in HOLDERS], 2)
    assert load_machine_state(made.state_dir / "operator").root_sha256 == keys.pin
    assert not (made.state_dir / "root.key").exists()
    assert not (made.state_dir / ROOT_DRAFT).exists()
    every = b"".join(file.read_bytes() for file in made.state_dir.rglob("*") if file.is_file())
    assert all(seed not in every for seed in SEEDS)
    with pytest.raises(ConfigError, match="nothing was prepared"):
        complete(made, signed(draft, *HOLDERS))


@pytest.mark.parametrize("signers", [[], HOLDERS[:1], [HOLDERS[0], Ed25519Signer(bytes(32))]])
def test_too_few_root_signatures_complete_nothing(tmp_path: Path, signers: list[Ed25519Signer]) -> None:
    made = settings(tmp_path)
    draft = drafted(made)
    with pytest.raises(RosterError) as caught:
        complete(made, signed(draft, *signers))
    assert caught.value.reason in ("THRESHOLD_NOT_MET", "ENVELOPE_MALFORMED")
    assert not (made.state_dir / "root.dsse").exists()
    complete(made, signed(draft, *HOLDERS))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: {"roster_keys": (*root.roster_keys, bytes(31) + b"\x07")},
        lambda root: {"roster_keys": (bytes(31) + b"\x07",)},
        lambda root: {"authorities": (*root.authorities, root.authorities[0])},
        lambda root: {"cluster": "other"},
        lambda root: {"expires": root.expires + 1},
        lambda root: {"root_threshold": 1},
    ],
)
def test_metadata_that_was_changed_on_the_way_is_refused(
    tmp_path: Path, change: Callable[[Any], dict[str, Any]]
) -> None:
    made = settings(tmp_path)
    root = read_root_draft(drafted(made))[0]
    other = draft_root(dataclasses.replace(root, **change(root)))
    with pytest.raises(ConfigError) as caught:
        complete(made, signed(other, *HOLDERS))
    assert caught.value.reason == "OTHER_ROOT_METADATA"
    assert not (made.state_dir / "root.dsse").exists()


def test_a_draft_that_lay_too_long_is_refused(tmp_path: Path) -> None:
    made = settings(tmp_path)
    draft = signed(drafted(made), *HOLDERS)
    with pytest.raises(RosterError) as caught:
        complete(made, draft, clock=lambda: wall_clock() + 11 * 365 * 86400)
    assert caught.value.reason == "ROOT_EXPIRED"
    check_root_times(follow_root(draft, None), now=wall_clock())


@pytest.mark.parametrize("content", [b"", b"junk", encode_chain([b"x"])])
def test_what_is_no_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    made = settings(tmp_path)
    drafted(made)
    with pytest.raises(SealringError):
        complete(made, content)
    assert not (made.state_dir / "root.dsse").exists()


def test_each_step_happens_once_and_in_order(tmp_path: Path) -> None:
    made = settings(tmp_path)
    with pytest.raises(ConfigError) as caught:
        complete(made, b"")
    assert caught.value.reason == "NOT_PREPARED"
    draft = drafted(made)
    for again in (lambda: drafted(made), lambda: init(made)):
        with pytest.raises(AlreadyExists):
            again()
    complete(made, signed(draft, *HOLDERS))
    (made.state_dir / ROOT_DRAFT).write_bytes(draft)
    with pytest.raises(AlreadyExists):
        complete(made, signed(draft, *HOLDERS))


def test_a_threshold_above_the_keys_is_refused(tmp_path: Path) -> None:
    for number, work in enumerate(
        [
            lambda made: drafted(made, threshold=4),
            lambda made: drafted(made, threshold=0),
            lambda made: prepare(made, [HOLDERS[0].public_key] * 2, 2),
            lambda made: drafted(made, roster_threshold=2),
            lambda made: init(made, roster_threshold=2),
        ]
    ):
        with pytest.raises(InvalidInput) as caught:
            work(settings(tmp_path / str(number)))
        assert caught.value.reason == "BAD_THRESHOLD"
        assert not (tmp_path / str(number)).exists(), "nothing was made that would be in the way"


async def test_two_roster_keys_sign_every_roster(
    tmp_path: Path, start_cluster: Callable[..., Awaitable[Cluster]]
) -> None:
    """End to end: a real node believes the rosters, and would not if one signature were gone."""
    files = [tmp_path / "elsewhere" / "second.key"]
    files[0].parent.mkdir()
    made = settings(tmp_path, roster_key_files=files)
    complete(made, signed(drafted(made, roster_threshold=2), *HOLDERS[1:]))
    cluster = await start_cluster(roster_key_files=files)
    node = await cluster.node("alpha")
    envelope = cluster.coordinator.publisher.current.envelope
    opened = parse_envelope(envelope, payload_type=ROSTER_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    root = cluster.coordinator.keys.root
    assert {name for name, _ in opened.signatures} == {key_id(key) for key in root.roster_keys}
    assert (len(opened.signatures), root.roster_threshold) == (2, 2)
    assert node.roster.version == cluster.coordinator.publisher.current.version
    for kept in opened.signatures:
        with pytest.raises(RosterError) as caught:
            one = encode_envelope(dataclasses.replace(opened, signatures=(kept,)))
            check_roster(one, root, now=time.time())
        assert caught.value.reason == "THRESHOLD_NOT_MET"


def test_a_coordinator_without_enough_roster_keys_does_not_start(tmp_path: Path) -> None:
    made = settings(tmp_path, roster_key_files=[tmp_path / "second.key"])
    init(made, roster_threshold=2)
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.load(settings(tmp_path), now=wall_clock())
    assert caught.value.reason == "TOO_FEW_ROSTER_KEYS"
    (tmp_path / "second.key").rename(tmp_path / "gone")
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.load(made, now=wall_clock())
    assert caught.value.reason == "STATE_MISSING"
    Ed25519Signer.create(tmp_path / "second.key")
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.load(made, now=wall_clock())
    assert caught.value.reason == "STATE_CORRUPT"


def test_keys_and_root_metadata_of_two_clusters_do_not_go_together(tmp_path: Path) -> None:
    made, other = settings(tmp_path), settings(tmp_path / "other")
    for one in (made, other):
        init(one, clock=lambda: 1_800_000_000)
    for name in ("ca.key", "ca.pem"):
        (made.state_dir / name).write_bytes((other.state_dir / name).read_bytes())
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.load(made, now=1_800_000_000)
    assert caught.value.reason == "STATE_CORRUPT"
    assert extend_root(made, now=1_800_000_000 + 9 * 365 * 86_400) is None
    (made.state_dir / "root.dsse").write_bytes(encode_chain([]))
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.load(made, now=1_800_000_000)
    assert caught.value.reason == "STATE_CORRUPT"


def test_the_same_key_twice_is_one_signature(tmp_path: Path) -> None:
    made = settings(tmp_path, roster_key_files=[tmp_path / "second.key"])
    init(made, roster_threshold=2)
    (tmp_path / "second.key").write_bytes((made.state_dir / "roster.key").read_bytes())
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.load(made, now=wall_clock())
    assert caught.value.reason == "TOO_FEW_ROSTER_KEYS"


def test_a_folder_that_a_full_disk_left_half_made_is_made_anew(tmp_path: Path) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path / "state", roster_key_files=[tmp_path / "second.key"])
    settings.state_dir.mkdir()
    (settings.state_dir / "of somebody else").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))  # room for keys, and for no database
    try:
        with pytest.raises(ConfigError) as caught:
            init(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.reason == "STATE_UNWRITABLE"
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"state", "state/coordinator.lock", "state/of somebody else"}
    init(settings)


def test_who_has_lost_the_operator_bundle_is_told_how_to_get_another(tmp_path: Path) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path / "a state")
    init(settings)
    with pytest.raises(AlreadyExists, match="move this one aside"):
        init(settings)
    shutil.rmtree(settings.state_dir / "operator")
    with pytest.raises(AlreadyExists, match=r"new-operator --state-dir '/.*/a state'"):
        init(settings)
    new_operator(settings)
    assert load_machine_state(settings.state_dir / "operator")


def test_a_key_file_that_is_there_already_is_never_overwritten(tmp_path: Path) -> None:
    other = Ed25519Signer.create(tmp_path / "second.key")
    made = settings(tmp_path, roster_key_files=[tmp_path / "second.key"])
    with pytest.raises(AlreadyExists):
        init(made)
    assert Ed25519Signer.load(tmp_path / "second.key").public_key == other.public_key
    assert not (made.state_dir / "roster.key").exists()


def test_the_first_version_is_a_chain_of_one(tmp_path: Path) -> None:
    made = settings(tmp_path)
    complete(made, signed(drafted(made), *HOLDERS))
    (only,) = decode_chain((made.state_dir / "root.dsse").read_bytes())
    assert len(parse_envelope(only, payload_type=PAYLOAD_TYPE, max_payload=1 << 15).signatures) == 3
    Store.open(made.state_dir).close()


def test_relative_paths_mean_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = settings(Path("."), roster_key_files=[Path("second.key")])
    init(made, roster_threshold=2)
    assert (tmp_path / "second.key").exists()
    assert len(ClusterKeys.load(made, now=wall_clock()).rosters) == 2
    with pytest.raises(AlreadyExists, match=r"roster\.key, second\.key"):
        init(made)


def test_a_draft_that_no_holder_could_read_is_not_written(tmp_path: Path) -> None:
    made = settings(tmp_path)
    keys = [Ed25519Signer.generate().public_key for _ in range(40)]
    with pytest.raises(RosterError):
        prepare(made, keys, 1)
    assert not (made.state_dir / ROOT_DRAFT).exists()


def test_what_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    made = settings(tmp_path / "new")
    init(made)
    open_to_all = settings(tmp_path / "there")
    open_to_all.state_dir.mkdir(parents=True)
    open_to_all.state_dir.chmod(0o755)
    init(open_to_all)
    for folder in (made.state_dir, open_to_all.state_dir):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (folder, *folder.iterdir())}
        public = {name: mode for name, mode in modes.items() if mode not in (0o600, 0o700)}
        assert public == {"ca.pem": 0o644, "root.dsse": 0o644}
        assert modes[folder.name] == modes["operator"] == 0o700
        assert modes["coordinator.lock"] == modes["coordinator.db"] == 0o600


def test_a_draft_may_be_carried_to_the_holders_of_keys(tmp_path: Path) -> None:
    made = settings(tmp_path)
    drafted(made)
    assert stat.S_IMODE((made.state_dir / ROOT_DRAFT).stat().st_mode) == 0o644


def test_a_root_lasts_ten_years(tmp_path: Path) -> None:
    made = settings(tmp_path)
    init(made, clock=lambda: 1_800_000_000)
    root = ClusterKeys.load(made, now=1_800_000_000).root
    assert (root.version, root.expires - root.issued) == (1, 10 * 365 * 86_400)


def test_a_root_and_its_authority_are_extended_at_half_of_their_time(tmp_path: Path) -> None:
    made, start, year = settings(tmp_path), 1_800_000_000, 365 * 86_400
    init(made, clock=lambda: start)
    pin = ClusterKeys.load(made, now=start).pin
    assert extend_root(made, now=start + 5 * year - 1) is None
    extended = extend_root(made, now=start + 5 * year)
    assert extended is not None
    assert (extended.version, extended.ends) == (2, start + 15 * year)
    keys = ClusterKeys.load(made, now=start)  # the clock was wrong, and is right again
    assert (keys.root, keys.pin) == (extended, pin)
    assert (keys.ca.certificate,) == extended.authorities
    assert ClusterCA.load(made.state_dir).certificate != keys.ca.certificate
    assert extend_root(made, now=start + 10 * year - 1) is None
    third = extend_root(made, now=start + 16 * year)  # also one that has ended
    assert third is not None
    assert (third.version, third.ends) == (3, start + 26 * year)
    assert verify_root_chain(third.chain, pin, now=start + 16 * year) == third


@pytest.mark.parametrize("there", ["none", "another"])
def test_a_root_whose_key_is_elsewhere_is_not_extended(tmp_path: Path, there: str) -> None:
    made, later = settings(tmp_path), 1_800_000_000 + 9 * 365 * 86_400
    init(made, clock=lambda: 1_800_000_000)
    (made.state_dir / "root.key").unlink()
    if there == "another":
        Ed25519Signer.create(made.state_dir / "root.key")
    assert extend_root(made, now=later) is None
    assert ClusterKeys.load(made, now=later).root.version == 1


def test_a_cluster_without_a_name_gets_one(tmp_path: Path) -> None:
    names = set()
    for number in range(2):
        made = settings(tmp_path / str(number), cluster="")
        init(made)
        names.add(ClusterKeys.load(made, now=time.time()).root.cluster)
    assert len(names) == 2
    assert all(re.fullmatch("ring-[a-z2-7]{8}", name) for name in names)


def test_a_database_whose_making_was_broken_off_is_not_used(tmp_path: Path) -> None:
    """What was made is committed with the first entry of the audit log."""
    with closing(Store.create(tmp_path)) as store, pytest.raises(ConfigError) as caught:
        check_stored(store)
    assert (caught.value.reason, "broken off" in caught.value.message) == ("STATE_CORRUPT", True)
