"""Blocks of layers that moved, between members over real mTLS, with a real roster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import PermissionDenied, SealringError
from sealring.mesh.ring import Chain, chain_of
from sealring.mesh.rpc import PeerChannel, Server, from_rpc_error, server_credentials
from sealring.node.daemon.prefix_disks import PrefixDisks, parts_of
from sealring.node.stored import asking, giving, policy
from sealring.node.stored.asking import BlocksAsker
from sealring.node.stored.giving import SERVICE, BlocksGiver
from sealring.node.stored.keys import StageIdentity, expand, model_folder, model_secret, stage_key
from sealring.node.stored.naming import Naming
from sealring.node.stored.parts import former_of, write_table
from sealring.node.stored.places import LayerBytes, StageTable, Unit, units_of
from sealring.node.stored.store import Store
from sealring.v1 import engine_pb2, links_pb2, links_pb2_grpc, membership_pb2

CLUSTER, DIGEST, LAYERS = "testbed", bytes(32), 9
CACHES = [b"weights of the giver", b"weights of the member that stays"]
CHAIN = chain_of(bytes(32), b"ckey", random.Random(1).randbytes(4 * 800))
UNITS = units_of(CHAIN)
TABLE = StageTable(
    b"layout",
    tuple(LayerBytes(3 + layer, ((5, 512), (7 * layer, 0))) for layer in range(LAYERS)),
    LayerBytes(0, ((4, 0),)),
)


def content(layer: int, unit: Unit) -> bytes:
    """What a layer has in a file."""
    return random.Random(f"{layer} {unit.place}").randbytes(TABLE.layers[layer].size(unit))


class World:
    """A giver that had the last layers of a ring of two, which a newcomer has some of now."""

    def __init__(self, cluster: Any, root: Path) -> None:
        self.cluster, self.root = cluster, root
        self.giver, self.stays, self.own = (cluster.party() for _ in range(3))
        self.former = (self.stays, 0, 4), (self.giver, 4, LAYERS)
        self.known: Callable[[], Any] = lambda: self.roster
        """The giver's roster."""
        self.servicer: Any = BlocksGiver(CLUSTER, root / "giver", self.giver.signer, lambda: self.known())
        self.server: Server | None = None
        self.asker = BlocksAsker(CLUSTER, self.own.store(), lambda: self.roster)
        self.disks = PrefixDisks(root / "own", CLUSTER, self.own.signer, None, self.asker)
        self.now = [CACHES[1], b"weights of the newcomer"]

    def sign(self, *ring: Any, members: Any = None) -> None:
        """The ring over the member that stays and the newcomer, of which the giver is no more; or another."""
        ring = ring or (self.stays, self.own)
        members = members or [self.stays, self.own, self.giver]
        _, self.roster = self.cluster.roster(ring, members=members, digest=DIGEST, layers=LAYERS)

    async def serve(self) -> None:
        self.server = Server([(links_pb2_grpc.add_BlocksServicer_to_server, self.servicer, SERVICE)])
        address = self.server.listen("127.0.0.1:0", server_credentials(self.giver.store()))
        self.giver.address = f"127.0.0.1:{address}"
        await self.server.start()
        self.sign()

    def store_at_giver(self, chain: Chain = CHAIN) -> None:
        root, layers = self.root / "giver", (4, LAYERS)
        caches = (CACHES[1], CACHES[0])
        stage = StageIdentity(CLUSTER, "demo", DIGEST.hex(), layers, 0, (), caches)
        key, folder = stage_key(root, stage, "demo", self.giver.signer), model_folder(root, DIGEST.hex())
        table = TABLE._replace(layers=TABLE.layers[4:])
        write_table(table, folder, key)
        store = Store(root, folder, expand(key, table.digest), 1 << 30)
        for unit in UNITS:
            whole = b"".join(content(layer, unit) for layer in range(4, LAYERS)) + bytes(4) * unit.is_snapshot
            assert store.write(chain.scope, unit.place, memoryview(whole))

    @property
    def plan(self) -> Any:
        members = self.roster.ring("demo-0").members
        facts = {"ring": "demo-0", "deployment": "demo", "model": "demo", "model_digest": DIGEST.hex()}
        rank = int(members[0].id != self.own.id)
        own = {"held": members[rank].held, "rank": rank, "members": members, "size": 2}
        return SimpleNamespace(**facts, **own, kv_bits=0, backend="", releases=(b"one",))

    @property
    def ring(self) -> membership_pb2.FormerRing:
        stages = zip(self.former, (CACHES[1], CACHES[0]), strict=True)
        return membership_pb2.FormerRing(
            stages=[
                membership_pb2.FormerStage(member=party.id, first_layer=first, end_layer=end, caches=caches)
                for (party, first, end), caches in stages
            ]
        )

    async def bring(self) -> Callable[[Unit], memoryview | None]:
        """Brings all that there is; reads files of this member's stage."""
        plan = self.plan
        disk = await self.disks.of(plan, self.now, [self.ring])
        assert disk is not None
        lo, hi = plan.held
        former = former_of(disk, TABLE._replace(layers=TABLE.layers[lo:hi]), lo)[0]
        asked = engine_pb2.BringBlocks(chain=CHAIN.packed())
        assert former.here(CHAIN.scope, UNITS[0])
        await self.disks.bring(plan, disk, asked)
        return lambda unit: former.read(CHAIN.scope, unit)

    def expected(self, unit: Unit) -> bytes:
        lo, hi = self.plan.held
        return b"".join(content(layer, unit) for layer in range(lo, hi)) + bytes(4) * unit.is_snapshot

    def request(self, **changed: Any) -> links_pb2.ReadBlocksRequest:
        lo, hi = self.plan.held
        fields = {"ring": "demo-0", "caches": [CACHES[1], CACHES[0]], "stage_first": 4, "stage_end": LAYERS}
        wanted = {"first": lo, "end": hi, "chain": CHAIN.packed()}
        return links_pb2.ReadBlocksRequest(**(fields | wanted | changed))

    async def pieces(self, request: links_pb2.ReadBlocksRequest, party: Any = None) -> list[bytes]:
        """What the giver sends to a caller. Raises a SealringError."""
        channel = PeerChannel(self.giver.address, (party or self.own).store(), self.giver.peer.server_name)
        try:
            call = links_pb2_grpc.BlocksStub(channel.get()).Read(request)
            return [piece.data async for piece in call]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await channel.close()


@pytest_asyncio.fixture
async def world(cluster: Any, tmp_path: Path) -> AsyncIterator[World]:
    made = World(cluster, tmp_path)
    await made.serve()
    yield made
    assert made.server is not None
    await made.server.stop(0)


async def test_a_newcomer_gets_its_layers_of_every_block_and_of_the_snapshot(world: World) -> None:
    world.store_at_giver()
    read = await world.bring()
    assert world.plan.held == (4, LAYERS)
    for unit in UNITS:
        assert read(unit) == world.expected(unit)


@pytest.mark.parametrize("stays", [False, True])
async def test_blocks_count_while_the_weights_of_members_that_stay_are_the_same(
    world: World, stays: bool
) -> None:
    now = [CACHES[1] if stays else b"other weights", world.now[1]]
    assert bool(parts_of(world.plan, now, world.ring)) is stays
    elsewhere = membership_pb2.FormerRing(stages=world.ring.stages[1:])
    assert not parts_of(world.plan, world.now, elsewhere), "nobody vouches for it, and layers are missing"


async def test_a_member_that_has_layers_for_prompts_alone_gets_them_too(world: World) -> None:
    world.store_at_giver()
    ring = world.roster.ring("demo-0")
    first = replace(ring.members[0], prompts=(0, 6))
    world.roster = replace(world.roster, rings=(replace(ring, members=(first, *ring.members[1:])),))
    assert await world.pieces(world.request(end=6), world.stays)
    with pytest.raises(PermissionDenied):
        await world.pieces(world.request(end=7), world.stays)


@given(
    st.lists(st.integers(0, LAYERS), min_size=2, max_size=8),
    st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).filter(lambda held: held[0] < held[1]),
    st.integers(0, 3),
)
def test_parts_of_stages_that_overlap_are_whole_and_its_own_where_it_had_them(
    edges: list[int], held: tuple[int, int], own: int
) -> None:
    """As members have them that hold layers for prompts alone."""
    ranges = sorted({(min(pair), max(pair)) for pair in zip(edges[::2], edges[1::2], strict=False)})
    ranges = [(first, end) for first, end in ranges if first < end]
    stages = [
        membership_pb2.FormerStage(member=str(at), first_layer=first, end_layer=end, caches=b"one")
        for at, (first, end) in enumerate(ranges)
    ]
    members = (SimpleNamespace(id=str(own)), SimpleNamespace(id="0"))
    plan: Any = SimpleNamespace(held=held, rank=0, members=members)
    parts = parts_of(plan, [b"one", b"one"], membership_pb2.FormerRing(stages=stages))
    covered = all(any(first <= layer < end for first, end in ranges) for layer in range(*held))
    assert bool(parts) is covered
    if parts:
        assert [parts[0].first, *(one.end for one in parts)] == [*(one.first for one in parts), held[1]]
        assert parts[0].first == held[0]
    for one in parts:
        assert one.stage_first <= one.first < one.end <= one.stage_end
        had = ranges[own] if own < len(ranges) else (0, 0)
        assert not had[0] <= one.first < had[1] or not one.member


async def test_only_the_member_that_has_the_layers_now_gets_them(world: World) -> None:
    world.store_at_giver()
    assert await world.pieces(world.request())
    stranger = world.cluster.party()
    for party, changed, reason in [
        (stranger, {}, "NOT_A_MEMBER"),
        (world.stays, {}, "NOT_ITS_LAYERS"),
        (world.own, {"ring": "other-0"}, "NOT_ITS_LAYERS"),
        (world.own, {"first": 3}, "NOT_ITS_LAYERS"),
        (world.own, {"end": 4}, "NOT_ITS_LAYERS"),
        (world.own, {"stage_first": 5}, "BAD_BLOCKS"),
        (world.own, {"caches": []}, "BAD_BLOCKS"),
        (world.own, {"chain": b"a"}, "BAD_PREFIXES"),
    ]:
        with pytest.raises(Exception) as raised:
            await world.pieces(world.request(**changed), party)
        assert raised.value.reason == reason  # type: ignore[attr-defined]
    other = chain_of(bytes(32), b"ckey", bytes(4 * 800))
    for changed in ({"caches": [b"a", b"b"]}, {"kv_bits": 8}, {"chain": other.packed()}):
        assert await world.pieces(world.request(**changed)) == [], "nothing of that was stored"
    _, world.roster = world.cluster.roster([world.stays, world.giver], digest=DIGEST, layers=LAYERS)
    with pytest.raises(Exception) as raised:
        await world.pieces(world.request(first=4, end=5))
    assert raised.value.reason == "NOT_A_MEMBER", "it was a member a moment ago"  # type: ignore[attr-defined]


class Scripted(links_pb2_grpc.BlocksServicer):
    """A giver that sends these pieces, and then breaks off, hangs or ends."""

    def __init__(self, pieces: list[bytes], *, breaks: bool = False, hangs: bool = False) -> None:
        self.pieces, self.breaks, self.hangs, self.calls = pieces, breaks, hangs, 0
        self.key = b""

    async def Read(self, request: Any, context: Any) -> Any:
        self.calls += 1
        for piece in self.pieces:
            await context.write(links_pb2.BlocksPiece(data=piece))
        if self.breaks:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if self.hangs:
            await asyncio.Event().wait()

    async def ReadNames(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        return links_pb2.NamesKey(key=self.key)


@pytest.mark.parametrize(
    "how", ["dies", "dies within a block", "ends early", "sends too much", "sends nothing", "hangs"]
)
async def test_a_giver_that_fails_half_way_costs_what_is_missing_and_is_left_alone(
    world: World, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.server is not None
    await world.server.stop(0)
    first, second = (world.expected(unit) for unit in UNITS[:2])
    sent = {
        "dies": [first],
        "dies within a block": [first, second[: len(second) // 2]],
        "ends early": [first, second[:-1]],
        "sends too much": [first, second + b"a"],
        "sends nothing": [first, b""],
        "hangs": [first],
    }[how]
    if how == "hangs":
        monkeypatch.setattr(asking, "_PIECE_SECONDS", 0.5)
    world.servicer = Scripted(sent, breaks=how.startswith("dies"), hangs=how == "hangs")
    await world.serve()
    read = await world.bring()
    assert [read(unit) for unit in UNITS[:2]] == [first, None]
    await world.bring()
    assert world.servicer.calls == 1, "each time would cost a row the wait"
    clock = asking.awake_clock() + asking.AGAIN_SECONDS
    monkeypatch.setattr(asking, "awake_clock", lambda: clock)
    await world.bring()
    assert world.servicer.calls == 2


async def test_a_caller_has_one_stream_at_a_time(world: World) -> None:
    world.store_at_giver()
    with world.servicer.slot(world.own.id), pytest.raises(Exception) as raised:
        await world.pieces(world.request())
    assert raised.value.reason == "BLOCKS_BUSY"  # type: ignore[attr-defined]
    assert await world.pieces(world.request())


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "_CALLS_PER_SECOND", 1e-6)


async def test_a_caller_asks_only_so_often(slowly: None, world: World) -> None:
    for _ in range(giving.CALLS_AT_ONCE):
        await world.pieces(world.request())
    with pytest.raises(Exception) as raised:
        for _ in range(giving.CALLS_AT_ONCE):
            await world.pieces(world.request())
    assert raised.value.reason == "RATE_LIMITED"  # type: ignore[attr-defined]


async def test_no_more_is_brought_than_the_disk_may_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store_at_giver()
    monkeypatch.setattr(policy, "WRITE_RATE", 0)
    monkeypatch.setattr(policy, "BURST", 200 + sum(len(world.expected(unit)) for unit in UNITS[:2]))
    read = await world.bring()
    assert [read(unit) for unit in UNITS] == [*map(world.expected, UNITS[:2]), *[None] * len(UNITS[2:])]


class Heads(World):
    """The giver was the head of the ring in which the newcomer is the head now."""

    def __init__(self, cluster: Any, root: Path) -> None:
        super().__init__(cluster, root)
        self.former = (self.giver, 0, 4), (self.stays, 4, LAYERS)
        self.now = [b"weights of the newcomer", CACHES[0]]

    def sign(self, *ring: Any, members: Any = None) -> None:
        super().sign(*(ring or (self.own, self.stays)), members=members)

    def names_of(self, party: Any, root: str) -> Naming:
        """The key of a member that has stored something."""
        stage = StageIdentity(CLUSTER, "demo", DIGEST.hex(), (0, 4), 0, (), tuple(CACHES))
        stage_key(self.root / root, stage, "demo", party.signer)
        secret = model_secret(self.root / root, DIGEST.hex(), party.signer)
        return Naming(self.root / root, secret, CLUSTER, "demo", DIGEST.hex())

    async def names(self) -> bytes:
        """The key by which the newcomer names prompts."""
        disk = await self.disks.of(self.plan, self.now, [self.ring])
        assert disk is not None
        assert disk.former
        return disk.names

    async def ask(self, party: Any = None, ring: str = "demo-0") -> bytes:
        """What the giver answers a caller. Raises a SealringError."""
        channel = PeerChannel(self.giver.address, (party or self.own).store(), self.giver.peer.server_name)
        try:
            stub = links_pb2_grpc.BlocksStub(channel.get())
            return bytes((await stub.ReadNames(links_pb2.ReadNamesRequest(ring=ring))).key)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await channel.close()


@pytest_asyncio.fixture
async def heads(cluster: Any, tmp_path: Path) -> AsyncIterator[Heads]:
    made = Heads(cluster, tmp_path)
    await made.serve()
    yield made
    assert made.server is not None
    await made.server.stop(0)


async def test_a_new_head_names_prompts_as_the_head_before_and_still_does_once_that_is_gone(
    heads: Heads,
) -> None:
    theirs = heads.names_of(heads.giver, "giver").read()[0]
    assert heads.names_of(heads.own, "own").read()[0] != theirs
    assert await heads.names() == theirs
    assert heads.server is not None
    await heads.server.stop(0)
    assert await heads.names() == theirs
    assert theirs not in b"".join(file.read_bytes() for file in heads.root.rglob("*.names"))


async def test_a_key_that_was_taken_is_passed_on(heads: Heads) -> None:
    heads.names_of(heads.giver, "giver").choose(bytes(range(32)), bytes(32))
    assert await heads.names() == bytes(range(32))


async def test_only_the_head_of_the_ring_gets_the_key_of_names(heads: Heads) -> None:
    own = heads.names_of(heads.giver, "giver").read()[0]
    assert await heads.ask() == own
    stranger = heads.cluster.party()
    for party, ring, reason in [
        (stranger, "demo-0", "NOT_A_MEMBER"),
        (heads.stays, "demo-0", "NOT_ITS_LAYERS"),
        (heads.giver, "demo-0", "NOT_ITS_LAYERS"),
        (heads.own, "demo-1", "NOT_ITS_LAYERS"),
        (heads.own, "", "NOT_ITS_LAYERS"),
    ]:
        with pytest.raises(SealringError) as raised:
            await heads.ask(party, ring)
        assert raised.value.reason == reason
    sharing = [replace(one, layers=(0, LAYERS)) for one in heads.roster.rings[0].members]
    tensor = replace(heads.roster.rings[0], members=tuple(sharing))
    heads.roster = replace(heads.roster, rings=(tensor,))
    with pytest.raises(SealringError) as raised:
        await heads.ask(heads.stays)
    assert raised.value.reason == "NOT_THE_HEAD", "it has the first layers, as all have"
    for ring, members, reason in [
        ((heads.stays, heads.own), None, "NOT_ITS_LAYERS"),
        ((heads.stays, heads.giver), [heads.stays, heads.giver], "NOT_A_MEMBER"),
    ]:
        heads.sign(*ring, members=members)
        with pytest.raises(SealringError) as raised:
            await heads.ask()
        assert raised.value.reason == reason, "it was the head a moment ago"


async def test_the_roster_says_of_which_model_and_deployment_the_key_is(heads: Heads) -> None:
    own = heads.names_of(heads.giver, "giver").read()[0]
    ring = heads.roster.rings[0]
    heads.roster = replace(heads.roster, rings=(replace(ring, deployment="other"),))
    assert await heads.ask() != own
    heads.roster = replace(heads.roster, rings=(replace(ring, model_digest=bytes([1]) * 32),))
    with pytest.raises(SealringError) as raised:
        await heads.ask()
    assert raised.value.reason == "NO_NAMES"


async def test_a_head_asks_until_the_giver_has_the_new_roster(heads: Heads) -> None:
    theirs = heads.names_of(heads.giver, "giver").read()[0]
    new, rosters = heads.roster, list[Any]()
    heads.sign(heads.giver, heads.stays)
    old, heads.roster = heads.roster, new

    def lagging() -> Any:
        rosters.append(old if len(rosters) < 3 else new)
        return rosters[-1]

    heads.known = lagging
    assert await heads.names() == theirs
    assert len(rosters) > 3


@pytest.mark.parametrize("how", ["gone", "hangs", "gives less", "gives more", "gives nothing", "evicted"])
async def test_a_head_that_is_given_no_key_has_its_own_and_asks_no_more(
    heads: Heads, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heads.server is not None
    await heads.server.stop(0)
    heads.servicer = Scripted([], hangs=how == "hangs")
    heads.servicer.key = bytes({"gives less": 31, "gives more": 33, "evicted": 32}.get(how, 0))
    await heads.serve()
    if how == "gone":
        await heads.server.stop(0)
    elif how == "hangs":
        monkeypatch.setattr(asking, "NAMES_SECONDS", 0.5)
    elif how == "evicted":
        heads.sign(members=[heads.own, heads.stays])
    own = heads.names_of(heads.own, "own").read()[0]
    assert await heads.names() == own
    calls = heads.servicer.calls
    assert calls == (how not in ("gone", "evicted"))
    heads.servicer.key = bytes(32)
    assert await heads.names() == own, "what it has named since would be lost"
    assert heads.servicer.calls == calls


async def test_only_a_head_asks(heads: Heads) -> None:
    heads.names_of(heads.giver, "giver")
    heads.sign(heads.stays, heads.own)
    heads.former, heads.now = ((heads.stays, 0, 4), (heads.giver, 4, LAYERS)), [CACHES[1], b"newcomer's"]
    own = heads.names_of(heads.own, "own").read()[0]
    disk = await heads.disks.of(heads.plan, heads.now, [heads.ring])
    assert disk is not None
    assert disk.names == own
