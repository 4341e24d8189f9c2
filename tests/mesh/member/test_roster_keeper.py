"""The roster of an enrolled machine on disk and in use: taken through the reader, and in no other way."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from sealring.mesh.crypto import SoftwareSigner, member_id
from sealring.mesh.errors import FailedPrecondition, PermissionDenied, RosterError
from sealring.mesh.member import (
    ROSTER,
    ROSTER_STATE,
    HeldRoster,
    MachineState,
    RosterKeeper,
    removed,
    roster_keeper,
)
from sealring.mesh.pki import (
    PeerIdentity,
    Role,
    TlsMaterial,
    decode_chain,
    encode_chain,
    sign_root,
    verify_root_chain,
)
from sealring.mesh.roster import Gateway, Revoked, RosterStateFile, check_roster
from sealring.testing import PaperCluster

GATEWAY = SoftwareSigner.generate().public_key


async def no_newer_root() -> None:
    raise AssertionError("nobody asked for newer root metadata")


@pytest.fixture
def paper() -> PaperCluster:
    made = PaperCluster()
    made.publish(gateways=(Gateway(member_id(GATEWAY), GATEWAY),))
    return made


def state_of(paper: PaperCluster) -> MachineState:
    peer = PeerIdentity("paper", Role.MEMBER, paper.draft.members[0].id)
    material = TlsMaterial(b"", b"", paper.root.authorities)
    return MachineState(peer, "one", "127.0.0.1:1", paper.root.fingerprint, paper.root, material)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RosterStateFile(tmp_path / ROSTER_STATE).create("paper")
    return tmp_path


class Wall:
    """The wall clock, `ahead` of the machine's by seconds."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def keeper(folder: Path, paper: PaperCluster, wall: Wall) -> RosterKeeper:
    return RosterKeeper(folder, state_of(paper), clock=wall)


async def test_of_two_rosters_that_are_accepted_at_once_the_newer_is_kept(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In use and on disk: the older one's thread is held up after it was accepted."""
    paper.publish()
    older = paper.envelope
    paper.publish()
    newer = paper.envelope
    begun, later = threading.Event(), threading.Event()
    write = roster_keeper.write_atomic

    def slow(path: Path, envelope: bytes) -> None:
        if envelope == older:
            begun.set()
            later.wait(1.0)  # until the newer one is there, if that does not wait for this one
        write(path, envelope)
        if envelope == newer:
            later.set()

    monkeypatch.setattr(roster_keeper, "write_atomic", slow)
    first = asyncio.create_task(keeper.accept(older, no_newer_root))
    await asyncio.to_thread(begun.wait)
    second = asyncio.create_task(keeper.accept(newer, no_newer_root))
    await asyncio.gather(first, second)
    assert keeper.signed()[0] == newer
    assert (folder / ROSTER).read_bytes() == newer


def test_without_memory_it_does_not_begin(tmp_path: Path, paper: PaperCluster) -> None:
    with refused("ROSTER_STATE_MISSING", RosterError):
        RosterKeeper(tmp_path, state_of(paper))


def test_before_the_first_roster_there_is_none(keeper: RosterKeeper) -> None:
    keeper.load()
    assert (keeper.valid, keeper.version, keeper.expired) == (None, 0, True)
    for ask in (lambda: keeper.current, keeper.signed, lambda: keeper.gateway_key("paper", "x")):
        with pytest.raises(FailedPrecondition):
            ask()


@pytest.mark.parametrize("how", ["too large", "a folder", "junk"])
async def test_a_stored_roster_that_cannot_be_read_is_as_none(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster, how: str
) -> None:
    """The coordinator has another one."""
    if how == "a folder":
        (folder / ROSTER).mkdir()
    else:
        (folder / ROSTER).write_bytes(b"junk" if how == "junk" else bytes((2 << 20) + 1))
    keeper.load()
    assert (keeper.valid, keeper.held) == (None, HeldRoster())
    assert await keeper.accept(paper.envelope, no_newer_root) == paper.roster


async def test_a_roster_is_kept_and_taken_up_again(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster
) -> None:
    assert await keeper.accept(paper.envelope, no_newer_root) == paper.roster
    again = RosterKeeper(folder, state_of(paper))
    again.load()
    for one in (keeper, again):
        assert (one.current, one.version, one.expired) == (paper.roster, paper.roster.version, False)
        assert one.held == HeldRoster(paper.roster.version, paper.roster.hash)
        envelope, chain = one.signed()
        root = verify_root_chain(decode_chain(chain), paper.root.fingerprint, now=time.time())
        assert check_roster(envelope, root, now=time.time()) == paper.roster


async def test_a_file_that_cannot_be_written_does_not_keep_a_roster_from_use(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster
) -> None:
    (folder / ROSTER).mkdir()
    assert await keeper.accept(paper.envelope, no_newer_root) == paper.roster
    assert keeper.signed()[0] == paper.envelope


async def test_a_refused_roster_leaves_what_was(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster
) -> None:
    await keeper.accept(paper.envelope, no_newer_root)
    stranger = PaperCluster()
    for envelope in (stranger.envelope, b"junk", paper.envelope[:-1]):
        with pytest.raises(RosterError):
            await keeper.accept(envelope, no_newer_root)
        assert keeper.signed()[0] == (folder / ROSTER).read_bytes() == paper.envelope


async def test_an_expired_roster_is_shown_to_nobody_by_an_optimized_python_either(
    folder: Path, paper: PaperCluster, wall: Wall
) -> None:
    """`python -O` runs no assert."""
    source = Path(str(roster_keeper.__file__))
    module = types.ModuleType(roster_keeper.__name__)
    exec(compile(source.read_text(), source, "exec", dont_inherit=True, optimize=1), vars(module))
    keeper: RosterKeeper = module.RosterKeeper(folder, state_of(paper), clock=wall)
    await keeper.accept(paper.envelope, no_newer_root)
    assert keeper.signed()[0] == paper.envelope
    wall.ahead = 3600
    with refused("ROSTER_EXPIRED", FailedPrecondition):
        keeper.signed()


async def test_an_expired_file_is_left_alone(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster, wall: Wall
) -> None:
    paper.publish(coordinators=("a:1", "b:2"))
    await keeper.accept(paper.envelope, no_newer_root)
    wall.ahead = 3600
    later = RosterKeeper(folder, state_of(paper), clock=wall)
    later.load()
    assert later.valid is None
    assert later.coordinators == keeper.coordinators == ("a:1", "b:2"), "whom it looks for"
    assert (folder / ROSTER).read_bytes() == paper.envelope


@pytest.mark.parametrize("how", ["told", "read"])
async def test_who_was_thrown_out_forgets_its_roster(
    keeper: RosterKeeper, folder: Path, paper: PaperCluster, how: str
) -> None:
    await keeper.accept(paper.envelope, no_newer_root)
    state = state_of(paper)
    paper.publish(members=paper.draft.members[1:], rings=())
    with refused("REMOVED", PermissionDenied):
        if how == "told":
            await keeper.accept(paper.envelope, no_newer_root)
        else:
            (folder / ROSTER).write_bytes(paper.envelope)
            RosterKeeper(folder, state).load()
    assert not (folder / ROSTER).exists()
    if how == "told":
        assert keeper.valid is None


async def test_newer_root_metadata_is_fetched_first(keeper: RosterKeeper, paper: PaperCluster) -> None:
    await keeper.accept(paper.envelope, no_newer_root)
    first = paper.root
    draft = dataclasses.replace(first, version=2, chain=())
    paper.authority.root = sign_root(draft, [paper.authority.root_signers[0]], previous=first)
    paper.publish(root_version=2)
    asked = []

    async def newer() -> None:
        asked.append(keeper.version)
        keeper.follow_root(paper.root)

    assert await keeper.accept(paper.envelope, newer) == paper.roster
    assert asked == [paper.roster.version - 1]
    assert keeper.signed()[1] == encode_chain(paper.root.chain)
    keeper.follow_root(paper.root)

    async def useless() -> None:
        asked.append(0)

    draft = dataclasses.replace(paper.root, version=3, chain=())
    paper.authority.root = sign_root(draft, [paper.authority.root_signers[0]], previous=paper.root)
    paper.publish(root_version=3)
    with pytest.raises(RosterError) as caught:
        await keeper.accept(paper.envelope, useless)
    assert (caught.value.reason, len(asked)) == ("ROSTER_ROOT_VERSION", 2)


async def test_two_histories_are_remembered_as_such(keeper: RosterKeeper, paper: PaperCluster) -> None:
    await keeper.accept(paper.envelope, no_newer_root)
    assert keeper.equivocation is None
    known, version = paper.roster.hash, paper.roster.version
    paper.publish(version=version, previous=paper.draft.previous, expires=paper.draft.expires - 1)
    with refused("ROSTER_EQUIVOCATION", RosterError):
        await keeper.accept(paper.envelope, no_newer_root)
    found: Any = keeper.equivocation
    assert (found.version, found.known, found.seen) == (version, known, paper.roster.hash)


async def test_the_revoked_stay_revoked_after_the_end_of_the_roster(
    keeper: RosterKeeper, paper: PaperCluster, wall: Wall
) -> None:
    key = SoftwareSigner.generate().public_key
    back = paper.draft.members[0]
    ends = Revoked(member_id(key), key, 1, int(time.time())), Revoked(back.id, back.identity_key, 0, 0)
    paper.publish(revoked=ends)
    await keeper.accept(paper.envelope, no_newer_root)
    wall.ahead = 3600
    assert keeper.expired
    assert keeper.revoked(member_id(key))
    assert not keeper.revoked(back.id), "it has joined again"


async def test_only_gateways_of_the_roster_and_the_cluster(keeper: RosterKeeper, paper: PaperCluster) -> None:
    await keeper.accept(paper.envelope, no_newer_root)
    keeper.gateway_key("paper", member_id(GATEWAY))
    for cluster, identifier in (
        ("other", member_id(GATEWAY)),
        ("paper", paper.draft.members[0].id),
        ("paper", ""),
    ):
        with refused("GATEWAY_NOT_ALLOWED", PermissionDenied):
            keeper.gateway_key(cluster, identifier)


def test_an_evicted_machine_is_told_the_commands_and_on_which_machine_each_runs() -> None:
    hint = removed().hint
    assert hint.index("sealring token code` on the cluster's first machine") < hint.index(
        "sealring join` here"
    )
