import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest
from onpath import ATTACKS, Proxy
from patience import until

from sealring.mesh.errors import SealringError
from sealring.mesh.pki import Role
from sealring.mesh.roster import MAX_RINGS_OF_MEMBER, Roster
from sealring.mesh.rpc import PROTOCOL_VERSION, PeerChannel, Server, own_release, server_credentials
from sealring.mesh.rpc.protocol import OLDEST_PROTOCOL
from sealring.mesh.system.addresses import parse_address
from sealring.node.carrier.neighbours import PASS_BYTES
from sealring.node.daemon import rotation
from sealring.node.daemon.epoch import LinkSecrets
from sealring.node.daemon.link_setup import LinkSetup
from sealring.node.daemon.plan import EpochPlan, plan_epoch
from sealring.node.daemon.rotation import Rotation, StepGate
from sealring.node.link import exchange
from sealring.node.link.exchange import MAX_OPEN_PER_PEER, SERVICE, Handshakes
from sealring.node.link.keys import SessionKeys
from sealring.v1 import links_pb2, links_pb2_grpc, membership_pb2, proof_pb2


class Daemon:
    def __init__(self, cluster, party, **seconds: float) -> None:
        self.party = party
        self.revoked: set[str] = set()
        self.handshakes = Handshakes(
            "testbed", party.signer, party.store(), revoked=self.revoked.__contains__, **seconds
        )
        self.server = Server([(links_pb2_grpc.add_LinksServicer_to_server, self.handshakes, SERVICE)])


@asynccontextmanager
async def daemons(cluster, count: int, **seconds: float) -> AsyncIterator[list[Daemon]]:
    found = [Daemon(cluster, cluster.party(), **seconds) for _ in range(count)]
    for daemon in found:
        port = daemon.server.listen("127.0.0.1:0", server_credentials(daemon.party.store()))
        daemon.party.address = f"127.0.0.1:{port}"
        await daemon.server.start()
    try:
        yield found
    finally:
        for daemon in found:
            assert not daemon.handshakes.awaited
        # of connections that were cut
        await until(lambda: not any(daemon.handshakes.open for daemon in found))
        for daemon in found:
            await daemon.server.stop(0)


def plan(roster: Roster, daemon: Daemon, epoch: int = 1) -> EpochPlan:
    ring = roster.rings[0]
    prepare = membership_pb2.PrepareEpoch(
        ring=ring.id,
        epoch=epoch,
        roster_version=roster.version,
        roster_hash=roster.hash,
        model=ring.model,
        model_digest=ring.model_digest.hex(),
        context=ring.context,
        max_rows=4,
        kv_budget=1 << 20,
        prefill_chunk=16,
        protocol=PROTOCOL_VERSION,
    )
    return plan_epoch(prepare, roster, daemon.party.id)


async def shake(daemon: Daemon, epoch: EpochPlan, **seconds: float) -> LinkSecrets:
    """One epoch's handshakes; none is answered afterwards."""
    setup = LinkSetup(daemon.handshakes, epoch, ring_address(daemon), lambda secrets: None, **seconds)
    try:
        return await setup.establish()
    finally:
        setup.close()
        await asyncio.sleep(0)


def ring_address(daemon: Daemon) -> str:
    return f"127.0.0.1:{10_000 + int(daemon.party.address.rpartition(':')[2]) % 10_000}"


def matches(sender: bytes, receiver: bytes) -> bool:
    ours, theirs = SessionKeys.from_carrier(sender), SessionKeys.from_carrier(receiver)
    (send, receive), (their_send, their_receive) = ours.take(), theirs.take()
    same = ours.session_id == theirs.session_id and send.key == their_receive.key
    return same and receive.key == their_send.key and send.key != receive.key


@pytest.mark.parametrize("size", [2, 3])
async def test_a_ring_shakes_hands(cluster, size: int) -> None:
    async with daemons(cluster, size) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        secrets = await asyncio.gather(*(shake(node, plan(roster, node)) for node in nodes))
        assert secrets[0].row_key == secrets[-1].row_key
        for rank, own in enumerate(secrets):
            following = secrets[(rank + 1) % size]
            assert own.next_address == ring_address(nodes[(rank + 1) % size])
            assert own.outgoing_pass == following.incoming_pass
            assert len(own.outgoing_pass) == PASS_BYTES
            assert matches(own.outgoing_keys, following.incoming_keys)
            assert bool(own.row_key) == (size > 2 and rank in (0, size - 1)), "at head and tail alone"
            links = {(info.from_rank, info.to_rank) for info in own.infos}
            assert links == {(rank, (rank + 1) % size), ((rank - 1) % size, rank)}
            assert {info.suite for info in own.infos} == {"x25519mlkem768-aes256gcm"}


async def test_a_handshake_that_is_early_waits(cluster) -> None:
    async with daemons(cluster, 2) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        first = asyncio.create_task(shake(nodes[0], plan(roster, nodes[0])))
        await asyncio.sleep(0.5)
        second = await shake(nodes[1], plan(roster, nodes[1]))
        assert (await first).outgoing_pass == second.incoming_pass


async def test_a_handshake_that_is_given_up_leaves_no_connection(cluster) -> None:
    """Also before the next collection of garbage."""

    async with daemons(cluster, 3) as nodes:
        ports = {int(node.party.address.rpartition(":")[2]) for node in nodes}

        def connections() -> int:
            found = psutil.Process().net_connections()
            return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports for one in found)

        _, roster = cluster.roster([node.party for node in nodes])
        gc.disable()
        try:
            for epoch in (1, 2):  # the middle one never calls
                given_up = [
                    asyncio.create_task(shake(nodes[n], plan(roster, nodes[n], epoch))) for n in (0, 2)
                ]
                await until(connections)
                for task in given_up:
                    task.cancel()
                await asyncio.wait(given_up)
                await until(lambda: not connections())
        finally:
            gc.enable()


async def refused(*establishing) -> set[str]:
    results = await asyncio.gather(*establishing, return_exceptions=True)
    reasons = set()
    for result in results:
        assert isinstance(result, BaseExceptionGroup)
        for error in result.exceptions:
            assert isinstance(error, SealringError)
            reasons.add(error.reason)
    return reasons


async def test_an_epoch_that_was_not_prepared_is_refused(cluster) -> None:
    async with daemons(cluster, 2, early_seconds=0.2) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        assert await refused(shake(nodes[0], plan(roster, nodes[0]), call_seconds=0.5)) <= {
            "HANDSHAKE_FAILED",
            "BROKEN_OFF",
        }


async def test_a_neighbour_that_never_calls_is_given_up(cluster) -> None:
    async with daemons(cluster, 2, deadline_seconds=0.1) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        assert await refused(shake(nodes[1], plan(roster, nodes[1]), peer_seconds=0.1)) == {"PEER_SILENT"}


async def test_other_rosters_do_not_agree(cluster) -> None:
    async with daemons(cluster, 2) as nodes:
        parties = [node.party for node in nodes]
        _, old = cluster.roster(parties)
        _, new = cluster.roster(parties)
        reasons = await refused(
            shake(nodes[0], plan(old, nodes[0]), call_seconds=0.0),
            shake(nodes[1], plan(new, nodes[1]), call_seconds=0.0),
        )
        assert reasons == {"WRONG_EPOCH_OR_LINK", "BROKEN_OFF"}


async def test_a_neighbour_of_another_release_is_told_so_at_both_ends(
    cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = proof_pb2.Release(software="0.0.1", protocol=OLDEST_PROTOCOL - 1)
    monkeypatch.setattr(exchange, "own_release", lambda: older)
    async with daemons(cluster, 2) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        results = await asyncio.gather(
            *(shake(node, plan(roster, node)) for node in nodes), return_exceptions=True
        )
        callers = [member.id for member in roster.rings[0].members]
        for result in results:
            assert isinstance(result, BaseExceptionGroup)
            errors = [one for one in result.exceptions if one.reason == "INCOMPATIBLE_VERSION"]
            assert errors, "of one of both links or of both, whichever is first"
            for error in errors:
                (caller,) = [one for one in callers if error.message.startswith(f"node {one} runs")]
                assert (
                    f"node {caller} runs sealring 0.0.1 (protocol {OLDEST_PROTOCOL - 1}) and node "
                    in error.message
                )
                assert error.hint.startswith(f"update node {caller};")


@pytest.mark.parametrize("inward", [False, True], ids=["to-responder", "to-initiator"])
@pytest.mark.parametrize("attack", ["truncate", "alter", "swallow"])
async def test_a_handshake_that_breaks_off_is_tried_again(cluster, attack: str, inward: bool) -> None:
    """Wherever on its way it is hit, both ends have the same keys in the end, those of one handshake."""
    async with daemons(cluster, 2) as nodes:
        proxy = Proxy(parse_address(nodes[1].party.address))
        nodes[1].party.address = proxy.address
        _, roster = cluster.roster([node.party for node in nodes])
        for skip in range(8):
            proxy.arm(ATTACKS[attack], inward=inward, skip=skip)
            own, other = await both_ends(nodes, roster, epoch=skip + 1, first_attempt=0.3)
            assert matches(own.outgoing_keys, other.incoming_keys)
            assert matches(other.outgoing_keys, own.incoming_keys)
            assert (own.outgoing_pass, own.incoming_pass) == (other.incoming_pass, other.outgoing_pass)
        proxy.close()


async def both_ends(
    nodes: list[Daemon], roster: Roster, epoch: int, **seconds: float
) -> tuple[LinkSecrets, LinkSecrets]:
    """The secrets of both carriers when both nodes have reported that they are prepared."""
    repeated: list[LinkSecrets] = []
    plans = [plan(roster, node, epoch) for node in nodes]
    setups = [
        LinkSetup(node.handshakes, one, ring_address(node), repeated.append, **seconds)
        for node, one in zip(nodes, plans, strict=True)
    ]
    try:
        own, other = await asyncio.gather(*(setup.establish() for setup in setups))
    finally:
        for setup in setups:
            setup.close()
        await asyncio.sleep(0)
    for secrets in repeated:  # the responder gets them
        other = other.renewed(secrets)
    return own, other


async def test_another_member_cannot_stand_in(cluster) -> None:
    """A valid member whose address is listed for another one fails at the TLS name already."""
    async with daemons(cluster, 3, deadline_seconds=0.5) as nodes:
        nodes[1].party.address = nodes[2].party.address
        _, roster = cluster.roster([node.party for node in nodes[:2]], members=[n.party for n in nodes])
        reasons = await refused(shake(nodes[0], plan(roster, nodes[0]), call_seconds=0.0, peer_seconds=0.5))
        assert reasons == {"PEER_UNREACHABLE"}


class Carrier:
    """Takes new keys, while steps go by at `gate`."""

    def __init__(self) -> None:
        self.gate = StepGate()
        self.renewed = {True: asyncio.Event(), False: asyncio.Event()}

    def rekey_wanted(self, *, outgoing: bool) -> asyncio.Event:
        return asyncio.Event()

    async def install(self, keys: bytes, *, outgoing: bool, at_step: int) -> None:
        self.renewed[outgoing].set()

    async def step(self) -> None:
        while True:
            await self.gate.pass_step()
            self.gate.passed(self.gate.last + 1)
            await asyncio.sleep(0.01)


async def test_keys_are_renewed_past_a_first_address_that_is_dead(
    cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a Mac that advertises Thunderbolt and Wi-Fi, with the cable out: nobody there ever answers."""
    for name in ("RENEW_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(rotation, name, 0.05)
    carriers = Carrier(), Carrier()
    async with daemons(cluster, 2) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        with socket.create_server(("127.0.0.1", 0)) as dead:
            rotating = []
            for node, carrier in zip(nodes, carriers, strict=True):
                made = plan(roster, node)
                addresses = f"127.0.0.1:{dead.getsockname()[1]}", *made.links[0].peer_addresses
                links = tuple(replace(link, peer_addresses=addresses) for link in made.links)
                made, gate = replace(made, links=links), carrier.gate
                work = Rotation(made, node.handshakes, gate, carrier, lambda link: link.params)
                rotating += [asyncio.create_task(one) for one in (work.run(), carrier.step())]
            try:
                async with asyncio.timeout(200):
                    for carrier in carriers:
                        await asyncio.gather(*(one.wait() for one in carrier.renewed.values()))
            finally:
                for task in rotating:
                    task.cancel()
                await asyncio.wait(rotating)


async def call(cluster, target: Daemon, caller, frames) -> grpc.StatusCode:
    name = target.party.peer.server_name
    channel = PeerChannel(target.party.address, caller.store(), name)
    try:
        stub = links_pb2_grpc.LinksStub(channel.get())
        stream = stub.Handshake(frames, timeout=200)
        async for _ in stream:
            pass
        return await stream.code()
    except grpc.RpcError as error:
        return error.code()
    finally:
        await channel.close()


async def send(*frames: links_pb2.HandshakeFrame) -> AsyncIterator[links_pb2.HandshakeFrame]:
    for frame in frames:
        yield frame
    await asyncio.sleep(0.2)


def hello(**changes) -> links_pb2.HandshakeFrame:
    fields = {"ring": "demo-0", "epoch": 1, "from_rank": 0, "to_rank": 1, "session": 0, **changes}
    fields["release"] = own_release()
    return links_pb2.HandshakeFrame(hello=links_pb2.LinkHello(**fields))


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.OPERATOR])
async def test_only_members_may_call(cluster, role: Role) -> None:
    async with daemons(cluster, 1) as nodes:
        code = await call(cluster, nodes[0], cluster.party(role), send(hello()))
        assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_member_that_is_not_the_neighbour_does_not_spoil_the_link(cluster) -> None:
    async with daemons(cluster, 3) as nodes:
        parties = [node.party for node in nodes]
        _, roster = cluster.roster(parties[:2], members=parties)
        waiting = asyncio.create_task(shake(nodes[1], plan(roster, nodes[1])))
        await asyncio.sleep(0.05)
        code = await call(cluster, nodes[1], parties[2], send(hello()))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        first = await shake(nodes[0], plan(roster, nodes[0]))
        assert isinstance(await waiting, LinkSecrets)
        assert first.outgoing_pass == waiting.result().incoming_pass


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [links_pb2.HandshakeFrame(sigma=b"x")],
        [hello(session=1)],
        [hello(), links_pb2.HandshakeFrame(sigma=b"")],
        [hello(), links_pb2.HandshakeFrame(sigma=b"\x01" * 17_000)],
        [hello(), hello()],
        [hello(), links_pb2.HandshakeFrame()],
    ],
)
async def test_broken_handshakes_end_in_one_way(cluster, frames) -> None:
    async with daemons(cluster, 2, deadline_seconds=1.0, early_seconds=0.5) as nodes:
        _, roster = cluster.roster([node.party for node in nodes])
        waiting = asyncio.create_task(shake(nodes[1], plan(roster, nodes[1]), peer_seconds=1.0))
        await asyncio.sleep(0.05)
        code = await call(cluster, nodes[1], nodes[0].party, send(*frames))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(BaseExceptionGroup):
            await waiting


async def test_open_handshakes_are_bounded(cluster) -> None:
    """They come early: what is too many is refused, the others wait."""
    most = MAX_OPEN_PER_PEER
    async with (
        daemons(cluster, 2, early_seconds=1000.0, deadline_seconds=1000.0) as nodes,
        asyncio.timeout(200),
    ):
        frames = [send(hello(epoch=number)) for number in range(most + 4)]
        calls = [asyncio.create_task(call(cluster, nodes[1], nodes[0].party, one)) for one in frames]
        while sum(task.done() for task in calls) < len(calls) - most:
            assert nodes[1].handshakes.open <= most
            await asyncio.sleep(0.01)
        assert nodes[1].handshakes.open == most
        nodes[1].revoked.add(nodes[0].party.id)
        nodes[1].handshakes.close_revoked()
        assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.PERMISSION_DENIED}


async def test_a_handshake_for_which_too_many_are_open_is_tried_again(cluster) -> None:
    """All rings of two members may shake hands at once, and what broke off before may still be open."""
    assert MAX_OPEN_PER_PEER >= 2 * MAX_RINGS_OF_MEMBER
    refusals: list[str] = []
    async with daemons(cluster, 2, early_seconds=1000.0) as nodes, asyncio.timeout(200):
        _, roster = cluster.roster([node.party for node in nodes])
        frames = [send(hello(epoch=1000 + number)) for number in range(MAX_OPEN_PER_PEER)]
        others = [asyncio.create_task(call(cluster, nodes[1], nodes[0].party, one)) for one in frames]
        await until(lambda: nodes[1].handshakes.open == len(others))
        known = nodes[0].handshakes.call

        async def noted(*args: Any, **more: Any) -> Any:
            try:
                return await known(*args, **more)
            except SealringError as error:
                refusals.append(error.reason)
                raise

        nodes[0].handshakes.call = noted  # type: ignore[method-assign]
        shaking = asyncio.create_task(both_ends(nodes, roster, epoch=1))
        await until(lambda: len(refusals) >= 2)
        assert not shaking.done()
        for other in others:
            other.cancel()
        own, peer = await shaking
        assert matches(own.outgoing_keys, peer.incoming_keys)
        assert set(refusals) == {"BROKEN_OFF"}


async def test_a_revoked_member_is_refused_at_once(cluster) -> None:
    """Its certificate is still good, and the handshake that it asks for would be waited for."""
    async with daemons(cluster, 2, early_seconds=1000.0) as nodes:
        nodes[1].revoked.add(nodes[0].party.id)
        async with asyncio.timeout(200):
            code = await call(cluster, nodes[1], nodes[0].party, send(hello()))
        assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_open_handshakes_of_a_revoked_member_end(cluster) -> None:
    async with daemons(cluster, 3, early_seconds=1000.0) as nodes:
        frames = [send(hello(epoch=number)) for number in range(3)]
        calls = [asyncio.create_task(call(cluster, nodes[1], nodes[0].party, one)) for one in frames]
        other = asyncio.create_task(call(cluster, nodes[1], nodes[2].party, send(hello())))
        await until(lambda: nodes[1].handshakes.open >= 4)
        nodes[1].revoked.add(nodes[0].party.id)
        nodes[1].handshakes.close_revoked()
        async with asyncio.timeout(200):
            assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.PERMISSION_DENIED}
        assert not other.done()
        other.cancel()
        await until(lambda: not nodes[1].handshakes.open)
