"""Models between members: over real mTLS, with a real roster."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from sealring.mesh.errors import ModelError, ResourceExhausted, SealringError, Unavailable
from sealring.mesh.pki import Role, TlsMaterial
from sealring.mesh.rpc import PeerChannel, Server, TlsStore, from_rpc_error, server_credentials
from sealring.node.models import giving, kept, manifest
from sealring.node.models.asking import ModelAsker
from sealring.node.models.folders import NOTE, FolderState
from sealring.node.models.giving import SERVICE, ModelGiver, decode, encode, write_piece
from sealring.node.models.kept import Note, every_part, note_of
from sealring.node.models.manifest import Manifest
from sealring.node.models.partial_model import PartialModel
from sealring.v1 import models_pb2, models_pb2_grpc

PART = 1 << 16


@pytest.fixture(autouse=True)
def small_numbers(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("giving.MAX_PIECE", PART // 4),
        ("asking.LEAST_PIECE", PART // 4),
        ("giving.MAX_PARTS", 3),
        ("asking.MAX_PARTS", 3),
        ("asking._BUSY_SECONDS", 0.02),
    ):
        monkeypatch.setattr(f"sealring.node.models.{name}", value)


def make_model(folder: Path, parts: int = 5) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "model.safetensors").write_bytes(random.Random(7).randbytes(parts * PART - 100))
    (folder / "code.py").write_text("import os")
    return folder


class Member:
    """A member that passes on what lies in its folder."""

    def __init__(self, cluster: Any, folder: Path, roster: Callable[[], Any]) -> None:
        self.party, self.folder = cluster.party(), folder / "model"
        self.write: Callable[[Any, bytes], Awaitable[None]] = write_piece
        notes = folder.with_name(f"{folder.name}-notes")
        self.giver = Giver(
            "testbed", [folder], notes, roster, lambda context, piece: self.write(context, piece)
        )


class Giver(ModelGiver):
    """Notes that it refuses a caller for want of a slot."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.refused = asyncio.Event()

    @contextmanager
    def slot(self, caller: str) -> Iterator[None]:
        with ExitStack() as held:
            try:
                held.enter_context(super().slot(caller))
            except SealringError:
                self.refused.set()
                raise
            yield


OTHERS = ["one", "another", "a third", "a fourth"]


@contextmanager
def busy(member: Member, callers: Sequence[str]) -> Iterator[None]:
    """The member serves these callers meanwhile."""
    with ExitStack() as held:
        for caller in callers:
            held.enter_context(member.giver.slot(caller))
        yield


class World:
    """Members with folders, and one roster for all."""

    def __init__(self, cluster: Any, tmp_path: Path) -> None:
        self.cluster, self.tmp_path = cluster, tmp_path
        self.members: list[Member] = []
        self.servers: list[Server] = []
        self.own = cluster.party()
        self.roster: Any = None

    async def add(self, name: str) -> Member:
        member = Member(self.cluster, self.tmp_path / name, lambda: self.roster)
        self.members.append(member)
        await self._serve(member.giver, member.party)
        return member

    async def scripted(self, servicer: Any) -> Any:
        """The party of a member that only this servicer answers for."""
        party = self.cluster.party()
        await self._serve(servicer, party)
        return party

    async def _serve(self, servicer: Any, party: Any) -> None:
        server = Server([(models_pb2_grpc.add_ModelsServicer_to_server, servicer, SERVICE)])
        party.address = f"127.0.0.1:{server.listen('127.0.0.1:0', server_credentials(party.store()))}"
        await server.start()
        self.servers.append(server)

    async def giver(self, parts: int = 5) -> Member:
        """The one member with the model, in a signed roster."""
        make_model(self.tmp_path / "a" / "model", parts=parts)
        member = await self.add("a")
        self.sign()
        return member

    def sign(self, *without: Any) -> None:
        parties = [self.own, *(one.party for one in self.members)]
        _, self.roster = self.cluster.roster(members=[one for one in parties if one not in without])

    async def fetch(self, partial: PartialModel, *more: Any, progress: Any = lambda done, size: None) -> bool:
        asker = ModelAsker("testbed", self.own.id, self.own.store(), lambda: self.roster)
        return await asker.fetch("org/model", partial, progress, *more)

    def partial(self) -> PartialModel:
        return PartialModel(self.tmp_path / "own", "org/model")

    @asynccontextmanager
    async def stub(self, member: Member, party: Any = None) -> AsyncIterator[Any]:
        name = member.party.peer.server_name
        channel = PeerChannel(member.party.address, (party or self.own).store(), name)
        try:
            yield models_pb2_grpc.ModelsStub(channel.get())
        finally:
            await channel.close()


@pytest.fixture
async def world(cluster: Any, tmp_path: Path) -> AsyncIterator[World]:
    world = World(cluster, tmp_path)
    yield world
    for member in world.members:
        await member.giver.stop()
    for server in world.servers:
        await server.stop(0)


async def refusal(call: Any) -> str:
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return from_rpc_error(error).reason
    return "none"


async def test_a_model_comes_from_the_member_that_has_it(world: World) -> None:
    there = make_model(world.tmp_path / "a" / "model")
    for inner in ("1_Pooling", "onnx"):
        (there / inner).mkdir()
        (there / inner / "config.json").write_text("[]")
    await world.add("a")
    await world.add("empty")
    world.sign()
    told: list[tuple[int, int]] = []
    partial = world.partial()
    assert await world.fetch(partial, progress=lambda *now: told.append(now))
    assert not partial.target.exists()
    found = partial.publish()
    assert found == world.tmp_path / "own" / "org" / "model"
    assert not partial.path.exists()
    names = {"config.json", "empty.txt", "model.safetensors", "1_Pooling/config.json"}
    files = {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()}
    assert files == names | {NOTE}
    assert all((found / name).read_bytes() == (there / name).read_bytes() for name in names)
    assert told[-1] == (Manifest.of(there).size, Manifest.of(there).size)


class Reading(models_pb2_grpc.ModelsServicer):
    """A member that reads its files for hours before it says what it has."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await asyncio.get_running_loop().create_future()


async def test_a_member_that_reads_for_long_does_not_hold_up_what_another_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for where nobody else has all of the model."""
    reading = Reading()
    slow = await world.scripted(reading)
    _, world.roster = world.cluster.roster(members=[world.own, slow])
    waiting = asyncio.create_task(world.fetch(world.partial()))
    await reading.asked.wait()
    assert not (await asyncio.wait((waiting,), timeout=0.1))[0]
    waiting.cancel()
    await asyncio.wait((waiting,))

    monkeypatch.setattr("sealring.node.models.asking.OTHERS_SECONDS", 0.05)
    make_model(world.tmp_path / "giver" / "model")
    giver = await world.add("giver")
    _, world.roster = world.cluster.roster(members=[world.own, slow, giver.party])
    partial = world.partial()
    assert await world.fetch(partial)
    assert not any(partial.missing())


async def test_nobody_has_it(world: World) -> None:
    await world.add("empty")
    world.sign()
    assert not await world.fetch(world.partial())


async def test_it_goes_on_behind_what_has_come(world: World) -> None:
    await world.giver()
    partial = world.partial()
    assert await world.fetch(partial)
    weights = partial.path / "model.safetensors"
    whole = weights.read_bytes()
    damaged = bytearray(whole[: 3 * PART + 17])  # as kill -9 leaves it, and a part that the disk lost
    damaged[2 * PART + 5] ^= 1
    weights.write_bytes(damaged)
    (partial.path / "stranger.txt").write_text("not of this model")
    sent: list[int] = []

    async def write(context: Any, piece: bytes) -> None:
        sent.append(len(decode(piece)))
        await write_piece(context, piece)

    world.members[0].write = write
    again = PartialModel(world.tmp_path / "own", "org/model")
    assert await world.fetch(again)
    assert weights.read_bytes() == whole
    assert again.done == Manifest.of(world.tmp_path / "a" / "model").size
    assert sum(sent) == len(whole) - 2 * PART
    assert not (partial.path / "stranger.txt").exists()


async def test_another_member_goes_on_where_one_lies(world: World) -> None:
    """One sends other bytes than its manifest says: it is asked no more, what was right is kept."""
    for name in ("a", "b"):
        make_model(world.tmp_path / name / "model")
    liar, _ = await world.add("a"), await world.add("b")
    world.sign()
    whole = (await liar.giver.manifest(world.tmp_path / "a" / "model")).digest

    async def write(context: Any, piece: bytes) -> None:
        await write_piece(context, encode(bytes(len(decode(piece)))))

    liar.write = write
    partial = world.partial()
    assert await world.fetch(partial)
    assert Manifest.of(partial.path).digest == whole


@pytest.mark.parametrize(("length", "good"), [(PART // 2, True), (PART // 8, False)])
async def test_pieces_may_have_the_length_of_another_release_and_no_less(
    world: World, monkeypatch: pytest.MonkeyPatch, length: int, good: bool
) -> None:
    await world.giver()
    monkeypatch.setattr(giving, "MAX_PIECE", length)
    fetching = world.fetch(world.partial())
    if good:
        assert await fetching
    else:
        with pytest.raises(Unavailable, match="other pieces"):
            await fetching


async def test_members_with_different_models_are_not_believed(world: World) -> None:
    """No first one is: both are named, and nothing comes."""
    make_model(world.tmp_path / "a" / "model")
    make_model(world.tmp_path / "b" / "model", parts=6)
    one, other = await world.add("a"), await world.add("b")
    world.sign()
    partial = world.partial()
    with pytest.raises(ModelError) as raised:
        await world.fetch(partial)
    assert raised.value.reason == "MODEL_VERSIONS_DIFFER"
    assert all(member.party.id[:16] in raised.value.message for member in (one, other))
    assert not partial.path.exists()


def change_unseen(file: Path) -> None:
    """Other bytes, with size and time as before: a reader of the file would notice."""
    before = file.stat()
    file.write_bytes(b"x" * before.st_size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_a_manifest_outlives_the_process_that_made_it(world: World) -> None:
    """Nothing is hashed again before the folder changes."""
    folder = make_model(world.tmp_path / "a" / "model")
    first = await (await world.add("a")).giver.manifest(folder)
    change_unseen(folder / "model.safetensors")
    again = await world.add("a")
    assert (await again.giver.manifest(folder)).digest == first.digest
    (folder / "config.json").write_text("{ }")
    changed = await again.giver.manifest(folder)
    assert [one.hashes == two.hashes for one, two in zip(changed.files, first.files, strict=True)] == [
        *(False, True, False)
    ]


async def test_a_fetched_model_is_noted_beside_it(world: World) -> None:
    folder = (await world.giver()).folder
    partial = world.partial()
    assert await world.fetch(partial)
    found = partial.publish()
    note = note_of(found)
    assert note is not None
    assert note.whole
    assert note.manifest.digest == Manifest.of(folder).digest
    change_unseen(found / "model.safetensors")  # it is passed on without being read
    assert (await (await world.add("own")).giver.manifest(found)).digest == note.manifest.digest
    (found / NOTE).write_text("{")
    with pytest.raises(ModelError) as raised:
        await (await world.add("own")).giver.manifest(found)
    assert raised.value.reason == "BAD_MODEL_NOTE"


async def test_a_model_of_another_commit_is_not_taken_and_its_own_goes_with_it(world: World) -> None:
    """Nor is the other's in reach of a stage: weights of two commits may look alike."""
    folder = make_model(world.tmp_path / "a" / "model")
    (folder / NOTE).unlink(missing_ok=True)
    manifest, commit = Manifest.of(folder), "c" * 40
    state = FolderState.read(folder)
    Note(manifest, every_part(manifest), state, commit, True, "ab" * 32).write(folder / NOTE)
    await world.add("a")
    world.sign()
    assert not await world.fetch(world.partial(), None, "e" * 40)
    partial = world.partial()
    assert await world.fetch(partial, None, commit)
    note = note_of(partial.publish())
    assert note is not None
    assert (note.is_part, note.commit, note.checked) == (False, commit, True)
    assert note.hub_files == "ab" * 32


@pytest.mark.parametrize(("other", "kept_of_it"), [("ab" * 32, "ab" * 32), ("", "ab" * 32), ("cd" * 32, "")])
async def test_what_members_tell_of_the_hubs_files_is_kept_if_they_agree(
    world: World, other: str, kept_of_it: str
) -> None:
    """Else a member could have another one pass for a commit with other weights."""
    for name, hub_files in (("a", "ab" * 32), ("b", other)):
        folder = make_model(world.tmp_path / name / "model")
        manifest, state = Manifest.of(folder), FolderState.read(folder)
        Note(manifest, every_part(manifest), state, "c" * 40, True, hub_files).write(folder / NOTE)
        await world.add(name)
    world.sign()
    partial = world.partial()
    assert await world.fetch(partial)
    note = note_of(partial.publish())
    assert note is not None
    assert (note.commit, note.hub_files) == ("c" * 40, kept_of_it)


@pytest.mark.parametrize(("commit", "hub_files"), [("main", ""), ("", "ab" * 32)])
async def test_who_tells_a_commit_that_is_none_gives_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, commit: str, hub_files: str
) -> None:
    """Nor who tells the files of one without it: they would pass for those of any."""
    folder = make_model(world.tmp_path / "a" / "model")
    manifest = Manifest.of(folder)
    note = Note(manifest, every_part(manifest), FolderState.read(folder), commit, True, hub_files)
    note.write(folder / NOTE)
    monkeypatch.setattr(kept, "is_commit", lambda text: True)  # as this member would have it
    await world.add("a")
    world.sign()
    assert not await world.fetch(world.partial())


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "main"},
        {"commit": 3},
        {"checked": "yes"},
        {"digest": "00" * 32},
        {"files": [{"name": "config.json"}]},
        {"files": [{"name": "config.json", "size": 2, "parts": "x", "have": ""}]},
        {"files": []},
        {"state": [["config.json", 1]]},
        {"state": None},
    ],
)
def test_a_note_that_says_anything_else_is_unusable(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What is in its folder is not known, so it is neither served nor passed on."""
    folder = make_model(tmp_path / "model")
    manifest, file = Manifest.of(folder), tmp_path / "note"
    written = Note(manifest, every_part(manifest), FolderState.read(folder), "c" * 40, True)
    written.write(file)
    assert Note.read(file, folder) == written
    assert Note.read(tmp_path / "none", folder) is None
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as raised:
        Note.read(file, folder)
    assert raised.value.reason == "BAD_MODEL_NOTE"


@pytest.mark.parametrize("spare", [0, -1])
def test_a_note_is_so_long_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    folder = make_model(tmp_path / "model")
    manifest, file = Manifest.of(folder), tmp_path / "note"
    Note(manifest, every_part(manifest), FolderState.read(folder)).write(file)
    monkeypatch.setattr(kept, "_MAX_NOTE", file.stat().st_size + spare)
    if spare < 0:
        with pytest.raises(ModelError):
            Note.read(file, folder)
    else:
        assert Note.read(file, folder) is not None


def ranges(*wanted: tuple[str, int, int]) -> Any:
    async def needs(folder: Path) -> Any:
        return wanted

    return needs


async def test_what_a_stage_needs_comes_and_no_more(world: World) -> None:
    """Nor is there room asked for more. Another stage's part comes beside it, and is passed on as well."""
    folder = make_model(world.tmp_path / "a" / "model", parts=9)
    member = await world.add("a")
    world.sign()
    whole = (folder / "model.safetensors").read_bytes()
    header = (folder / "model.safetensors").open("r+b")
    with header:
        header.write((PART).to_bytes(8, "little"))  # reaches into the second part
    whole = (folder / "model.safetensors").read_bytes()
    partial = world.partial()
    wanted = ("model.safetensors", 4 * PART + 7, 5 * PART + 1)
    sizes: list[int] = []
    assert await world.fetch(partial, ranges(wanted), progress=lambda done, size: sizes.append(size))
    assert partial.size == 4 * PART + 2
    assert set(sizes) == {0, 4 * PART + 2}, "the headers are no share of it"
    assert sizes == sorted(sizes)
    found = partial.publish()
    there = (found / "model.safetensors").read_bytes()
    assert there == whole[: 2 * PART] + bytes(2 * PART) + whole[4 * PART : 6 * PART] + bytes(
        len(whole) - 6 * PART
    )
    note = note_of(found)
    assert note is not None
    assert not note.whole
    assert note.done == 4 * PART + 2

    again = world.partial()
    assert again.path == found  # it is filled where it is
    wanted = ("model.safetensors", 8 * PART, len(whole))
    assert await world.fetch(again, ranges(wanted))
    again.publish()
    taker = await world.add("own")
    del world.members[world.members.index(member)]  # only parts are left in the roster
    world.sign()
    further = PartialModel(world.tmp_path / "further", "org/model")
    assert await world.fetch(further, ranges(wanted))
    with pytest.raises(Unavailable) as raised:
        await world.fetch(further)
    assert raised.value.reason == "MODEL_NOT_FETCHED"
    digest = (await taker.giver.manifest(found)).digest
    async with world.stub(taker) as stub:
        asked = models_pb2.ReadModelRequest(manifest=digest, file=2, first=3, parts=1)
        assert await refusal(stub.Read(asked)) == "BAD_MODEL_RANGE"
    world.members.append(member)


async def test_a_part_that_was_copied_is_looked_at_again(world: World) -> None:
    """It has other times, perhaps not all of its parts. A note of when more lay there is not believed."""
    folder = make_model(world.tmp_path / "a" / "model", parts=6)
    with (folder / "model.safetensors").open("r+b") as header:
        header.write((8).to_bytes(8, "little"))
    await world.add("a")
    world.sign()
    partial = world.partial()
    wanted = ("model.safetensors", 3 * PART, 5 * PART)
    assert await world.fetch(partial, ranges(wanted))
    found = partial.publish()
    before = note_of(found)
    assert before is not None
    with (found / "model.safetensors").open("r+b") as stream:
        stream.seek(3 * PART)
        stream.write(bytes(PART))
    for path in found.iterdir():
        os.utime(path, ns=(5, 5))
    notes = world.tmp_path / "own-notes"
    notes.mkdir()
    stale = Note(before.manifest, every_part(before.manifest), FolderState.read(found))
    stale.write(notes / f"{hashlib.sha256(bytes(found.resolve())).hexdigest()}.json")
    for _ in range(2):  # the second time by the note that the first has written
        known = await (await world.add("own")).giver.known(found)
        assert known.manifest.digest == before.manifest.digest
        assert known.have[2] == before.have[2] - {3}


def give_and_stall(pipe: Any, material: TlsMaterial, folder: Path, caller: str) -> None:
    """A process that passes on two parts and a bit, and no more."""
    giving.PART = manifest.PART = PART
    giving.MAX_PIECE = PART // 4
    sent = 0

    async def write(context: Any, piece: bytes) -> None:
        nonlocal sent
        await write_piece(context, piece)
        sent += len(decode(piece))
        if sent > 2 * PART:
            await asyncio.Event().wait()

    async def serve() -> None:
        roster: Any = SimpleNamespace(members=[SimpleNamespace(id=caller)])
        giver = ModelGiver("testbed", [folder], folder / "notes", lambda: roster, write)
        server = Server([(models_pb2_grpc.add_ModelsServicer_to_server, giver, SERVICE)])
        pipe.send(server.listen("127.0.0.1:0", server_credentials(TlsStore(material))))
        await server.start()
        await asyncio.Event().wait()

    asyncio.run(serve())


async def test_a_member_that_is_killed_while_it_gives(world: World) -> None:
    """The member ends by SIGKILL. Parts that arrived are kept, and another member gives only the rest."""
    make_model(world.tmp_path / "a" / "model")
    ours, theirs = multiprocessing.Pipe()
    killed = world.cluster.party()
    process = multiprocessing.get_context("spawn").Process(
        target=give_and_stall, args=(theirs, killed.store().current()[1], world.tmp_path / "a", world.own.id)
    )
    process.start()
    theirs.close()
    try:
        killed.address = f"127.0.0.1:{await asyncio.to_thread(ours.recv)}"
        _, world.roster = world.cluster.roster(members=[world.own, killed])
        partial, come = world.partial(), asyncio.Event()

        def progress(now: int, size: int) -> None:
            if now >= 2 * PART:  # progress counts pieces; a part is stored with its last one
                come.set()

        fetching = asyncio.create_task(world.fetch(partial, progress=progress))
        await come.wait()
        process.kill()
        with pytest.raises(Unavailable) as raised:
            await fetching
        assert raised.value.reason == "MODEL_NOT_FETCHED"
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
        ours.close()
    await world.add("a")
    world.sign()
    again = world.partial()
    told: list[int] = []
    assert await world.fetch(again, progress=lambda now, size: told.append(now) if size else None)
    assert told[0] == partial.done >= 2 * PART
    assert Manifest.of(again.path).digest == Manifest.of(world.tmp_path / "a" / "model").digest


async def test_a_connection_that_breaks_does_not_end_the_transfer(world: World) -> None:
    """The part that was under way comes again, and no other."""
    await world.giver(parts=8)
    sent = 0

    async def write(context: Any, piece: bytes) -> None:
        nonlocal sent
        sent += 1
        if sent in (8, 21):
            raise Unavailable("cut off")
        await write_piece(context, piece)

    world.members[0].write = write
    partial = world.partial()
    assert await world.fetch(partial)
    assert partial.done == partial.size == Manifest.of(world.tmp_path / "a" / "model").size


async def test_a_model_that_nobody_gives_whole(world: World) -> None:
    await world.giver()

    async def write(context: Any, piece: bytes) -> None:
        await write_piece(context, encode(bytes(len(decode(piece)))))

    world.members[0].write = write
    with pytest.raises(Unavailable) as raised:
        await world.fetch(world.partial())
    assert raised.value.reason == "MODEL_NOT_GIVEN"


# Attacks


async def test_only_members_of_the_roster_are_answered(world: World) -> None:
    member = await world.giver()
    request = models_pb2.DescribeModelRequest(model="model")
    gateway, stranger = world.cluster.party(Role.GATEWAY), world.cluster.party()
    for party in (gateway, stranger):
        async with world.stub(member, party) as stub:
            assert await refusal(stub.Describe(request)) == "NOT_A_MEMBER"
            assert await refusal(stub.Read(models_pb2.ReadModelRequest())) == "NOT_A_MEMBER"
    async with world.stub(member) as stub:
        assert await refusal(stub.Describe(request)) == "none"
        world.roster = None  # expired
        assert await refusal(stub.Describe(request)) == "NOT_A_MEMBER"


async def test_who_is_thrown_out_gets_no_further_part(world: World) -> None:
    member = await world.giver()
    folder = member.folder
    digest = (await member.giver.manifest(folder)).digest
    going = asyncio.Event()

    async def write(context: Any, piece: bytes) -> None:
        await write_piece(context, piece)
        going.set()
        world.sign(world.own)

    member.write = write
    async with world.stub(member) as stub:
        call = stub.Read(models_pb2.ReadModelRequest(manifest=digest, file=2, first=0, parts=3))
        assert await refusal(call) == "NOT_A_MEMBER"
    assert going.is_set()


@pytest.mark.parametrize(
    "name", ["../model", "/etc", "model/../../x", "", "a/b/c", ".partial", "x" * 300, "\0"]
)
async def test_names_that_lead_elsewhere(world: World, name: str) -> None:
    make_model(world.tmp_path / "a" / "model")
    make_model(world.tmp_path / "a" / ".partial" / "model")
    member = await world.add("a")
    world.sign()
    async with world.stub(member) as stub:
        assert await refusal(stub.Describe(models_pb2.DescribeModelRequest(model=name))) == "MODEL_NOT_FOUND"


async def test_links_that_lead_out_are_not_followed(world: World) -> None:
    member = await world.giver()
    folder = member.folder
    secret = world.tmp_path / "identity.json"
    secret.write_text("secret")
    (folder / "extra.json").symlink_to(secret)
    async with world.stub(member) as stub:
        request = models_pb2.DescribeModelRequest(model="model")
        assert await refusal(stub.Describe(request)) == "MODEL_FOLDER_UNUSABLE"
        (folder / "extra.json").unlink()
        manifest = Manifest.from_message(await stub.Describe(request))
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(secret)  # between the manifest and the reading
        call = stub.Read(models_pb2.ReadModelRequest(manifest=manifest.digest, file=0, first=0, parts=1))
        assert await refusal(call) == "MODEL_CHANGED"


async def test_ranges_and_manifests_that_there_are_not(world: World) -> None:
    member = await world.giver()
    folder = member.folder
    digest = (await member.giver.manifest(folder)).digest
    bad = [(9, 0, 1), (2, 0, 0), (2, 0, 4), (2, 4, 2), (2, (1 << 32) - 1, 1), (1, 0, 1)]
    async with world.stub(member) as stub:
        for file, first, parts in bad:
            asked = models_pb2.ReadModelRequest(manifest=digest, file=file, first=first, parts=parts)
            assert await refusal(stub.Read(asked)) == "BAD_MODEL_RANGE"
        assert await refusal(stub.Read(models_pb2.ReadModelRequest(manifest=b"x"))) == "UNKNOWN_MANIFEST"


async def test_one_stream_for_each_caller_and_few_in_all(world: World) -> None:
    member = await world.giver()
    folder = member.folder
    digest = (await member.giver.manifest(folder)).digest
    asked = models_pb2.ReadModelRequest(manifest=digest, file=2, first=0, parts=3)
    async with world.stub(member) as stub:
        for held in ([world.own.id], OTHERS):
            with busy(member, held):
                assert await refusal(stub.Read(asked)) == "MODELS_BUSY"
        for _ in range(2):  # the first stream leaves its slot
            assert await refusal(stub.Read(asked)) == "none"
        reasons = [await refusal(stub.Read(models_pb2.ReadModelRequest())) for _ in range(64)]
        assert "RATE_LIMITED" in reasons


@pytest.mark.parametrize(
    "files",
    [
        [],
        [("config.json", 1, 1), ("../x.json", 1, 1)],
        [("config.json", 1, 1), ("a.json", 1, 1)],
        [("CONFIG.json", 1, 1), ("config.json", 1, 1)],
        [("config.json", 1, 0)],
        [("config.json", 1 << 60, 1)],
        [("config.json", 1, 1), ("run.py", 1, 1)],
        [("a.json", 1, 1)],
    ],
)
def test_manifests_that_are_refused(files: list[tuple[str, int, int]]) -> None:
    message = models_pb2.ModelManifest(
        files=[
            models_pb2.ModelFile(name=name, size=size, parts=bytes(32 * parts)) for name, size, parts in files
        ]
    )
    with pytest.raises(ModelError) as raised:
        Manifest.from_message(message)
    assert raised.value.reason == "BAD_MANIFEST"


async def test_a_busy_member_is_asked_again(world: World) -> None:
    member = await world.giver()
    fetching = asyncio.create_task(world.fetch(world.partial()))
    with busy(member, OTHERS):
        await member.giver.refused.wait()
    assert await fetching


class Occupied(models_pb2_grpc.ModelsServicer):
    """A member that always says that it is busy."""

    async def Describe(self, request: Any, context: Any) -> Any:
        raise ResourceExhausted("busy", reason="MODELS_BUSY")


async def test_members_that_stay_busy_are_passed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next member is asked, and without one the fetch ends, so that the hub can be asked."""
    monkeypatch.setattr("sealring.node.models.asking.PATIENCE_SECONDS", 0.0)
    mute = await world.scripted(Occupied())
    for name in ("a", "b"):
        make_model(world.tmp_path / name / "model")
    giver, other = [await world.add(name) for name in ("a", "b")]
    for parties in ([mute], [mute, giver.party]):
        _, world.roster = world.cluster.roster(members=[world.own, *parties])
        with busy(giver, OTHERS), pytest.raises(Unavailable) as raised:
            await world.fetch(world.partial())
        assert raised.value.reason == "MODEL_NOT_GIVEN"
    _, world.roster = world.cluster.roster(members=[world.own, mute, giver.party, other.party])
    with busy(giver, OTHERS):
        assert await world.fetch(world.partial())
