"""A cluster whose members this process plays: real mTLS, a real signed roster, real control streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from actedcoordinator import ActedCoordinator
from prooftest import answer_offer

from sealring.mesh.crypto import SoftwareSigner, member_id
from sealring.mesh.errors import EpochEnded
from sealring.mesh.member import (
    IDENTITY_KEY,
    ROSTER,
    ROSTER_STATE,
    CalledProof,
    Purpose,
    by_identity,
    of_identity,
)
from sealring.mesh.pki import PeerIdentity, Role, TlsMaterial
from sealring.mesh.ring import Composition
from sealring.mesh.roster import (
    NO_PREVIOUS,
    Gateway,
    RingMember,
    RosterStateFile,
    check_roster,
)
from sealring.mesh.rpc import PROTOCOL_VERSION, Server, TlsStore, server_credentials, to_problem
from sealring.mesh.system.files import write_atomic
from sealring.testing.authority import Authority, make_member, make_ring, make_roster
from sealring.v1 import control_pb2 as control
from sealring.v1 import control_pb2_grpc as control_grpc
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import membership_pb2 as membership

CLUSTER = "demo"
CHUNK = 16
CONTEXT = 512


class ActedRing:
    """The members of one ring, played: every answer to a prompt of n words is "w1 w2 ... wn" and stops."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 1
        self.renewed: dict[int, asyncio.Queue[bytes]] = {rank: asyncio.Queue() for rank in range(size)}
        self.streams: dict[int, asyncio.Queue[control.ScheduleResponse | None]] = {}
        self.steps: dict[int, list[control.Step]] = {}
        self.silent: set[int] = set()
        self.hold = False
        self.proves = True
        self.believed: list[int] = []
        self.goodbyes: list[str] = []
        self.kv_budget = 1 << 30
        self._begin()

    def _begin(self) -> None:
        self.composition = Composition(epoch=self.epoch, max_rows=8, prefill_chunk=CHUNK)
        self.answers: dict[int, list[str]] = {}
        self.given: dict[int, int] = {}
        self.steps = {rank: [] for rank in range(self.size)}
        self.held: list[control.Step] = []

    def next_epoch(self) -> None:
        """Ends the epoch as a fault does."""
        fault = membership.EpochFault(epoch=self.epoch, problem=to_problem(EpochEnded("it broke")))
        for stream in self.streams.values():
            stream.put_nowait(control.ScheduleResponse(fault=fault))
            stream.put_nowait(None)
        self.epoch += 1
        self._begin()

    def step(self, rank: int, step: control.Step) -> None:
        self.steps[rank].append(step)
        if all(len(steps) >= step.number for steps in self.steps.values()):
            assert all(steps[step.number - 1] == step for steps in self.steps.values())
            self.held.append(step)
            self.release()

    def release(self) -> None:
        while self.held and not self.hold:
            step = self.held.pop(0)
            resolved = self.composition.apply(step)
            if not (resolved.chunks or resolved.rows):
                continue
            done = control.StepDone(step=step.number)
            for row in resolved.sampled:
                if row in self.answers:
                    self._output(row, done.outputs.add(row=row))
            self.streams[0].put_nowait(control.ScheduleResponse(done=done))

    def _output(self, row: int, output: control.RowOutput) -> None:
        words = self.answers[row]
        self.given[row] += 1
        output.delta.tokens = self.given[row]
        if words:
            output.delta.text = words.pop(0) + " "
        if not words:
            output.finish = inference.FINISH_REASON_STOP
            del self.answers[row]

    def open(self, request: control.OpenRow) -> None:
        words, answered = request.envelope.clear.text.split(), request.envelope.clear.resume.tokens
        response = control.ScheduleResponse()
        if len(words) > CONTEXT:
            problem = membership.Problem(
                code="INVALID_ARGUMENT", reason="CONTEXT_TOO_LONG", message="the prompt is too long"
            )
            response.refused.CopyFrom(control.RowRefused(row=request.row, problem=problem))
        else:
            self.answers[request.row] = words[len(answered) :]
            self.given[request.row] = len(answered)
            response.opened.row = request.row
            response.opened.prompt_tokens = len(words) + len(answered)
            response.opened.answered = len(answered)
            response.opened.params_bytes = 64
            response.opened.max_tokens = min(request.max_tokens or CONTEXT, CONTEXT) - len(answered)
        self.streams[0].put_nowait(response)


class ActedMember(control_grpc.ControlServicer):
    """One member's Control service."""

    def __init__(self, cluster: ActedCluster, rank: int, signer: SoftwareSigner, own: str) -> None:
        self._ring = cluster.ring
        self._rank = rank
        self._signer = signer
        self._own = own
        self._gateway = cluster.gateway.public_key

    async def Schedule(self, requests: Any, context: Any) -> AsyncIterator[control.ScheduleResponse]:
        ring, rank = self._ring, self._rank
        proof, answer = await answer_offer(
            requests, context, Purpose.SCHEDULE, by_identity(self._signer), called=self._own
        )
        if ring.proves:
            yield control.ScheduleResponse(proof=answer)
        else:
            yield control.ScheduleResponse(
                attached=control.Attached(ring="ring-0", epoch=ring.epoch, rank=rank)
            )
        proof.check((await anext(requests)).proof, of_identity(self._gateway))
        ring.believed.append(rank)
        first = await anext(requests)
        if first.attach.epoch != ring.epoch:
            raise EpochEnded("not this epoch", reason="EPOCH_NOT_SERVING")
        out: asyncio.Queue[control.ScheduleResponse | None] = asyncio.Queue()
        ring.streams[rank] = out
        reader = asyncio.create_task(self._read(requests, out, proof))
        attached = control.Attached(
            ring="ring-0",
            epoch=ring.epoch,
            rank=rank,
            kv_bytes_per_token=1024,
            kv_bytes_per_row=64,
            kv_budget=ring.kv_budget,
        )
        try:
            yield control.ScheduleResponse(attached=attached)
            while (response := await out.get()) is not None:
                yield response
        finally:
            reader.cancel()
            if ring.streams.get(rank) is out:
                del ring.streams[rank]

    async def _read(
        self, requests: Any, out: asyncio.Queue[control.ScheduleResponse | None], proof: CalledProof
    ) -> None:
        ring, rank = self._ring, self._rank
        epoch = ring.epoch
        async for request in requests:
            kind = request.WhichOneof("message")
            if rank in ring.silent:
                continue
            if kind == "goodbye":
                ring.goodbyes.append(request.goodbye.reason)
                out.put_nowait(None)
            elif ring.epoch != epoch:
                continue  # sent before the gateway knew that the epoch is over
            elif kind == "ping":
                out.put_nowait(control.ScheduleResponse(pong=control.Pong(sequence=request.ping.sequence)))
            elif kind == "renewal":
                proof.check_renewal(request.renewal, of_identity(self._gateway))
                ring.renewed[rank].put_nowait(request.renewal.certificate)
            elif kind == "step":
                ring.step(rank, request.step)
            elif kind == "open":
                ring.open(request.open)
            elif kind == "discard":
                ring.answers.pop(request.discard.row, None)


class ActedCluster:
    """Authority, coordinator and members. `state_dir` is an enrolled gateway's."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.ring = ActedRing(size)
        self.authority = Authority.create(CLUSTER, now=time.time())
        self.state_dir = folder / "gateway"
        self.members = [SoftwareSigner.generate() for _ in range(size)]
        self.gateway = SoftwareSigner.load_or_create(self.state_dir / IDENTITY_KEY)
        own = {member_id(self.gateway.public_key): self.gateway.public_key}
        self.coordinator = ActedCoordinator(self.authority, own)
        self.version = 0
        self.previous = NO_PREVIOUS
        self._servers: list[Server] = []
        self.ports: list[int] = []

    def material(self, peer: PeerIdentity, lifetime: int = 3600) -> TlsMaterial:
        begun = time.time() if lifetime == 3600 else time.time() - 0.6 * lifetime
        return self.authority.material(peer, now=begun, lifetime=lifetime)

    def peer(self, signer: SoftwareSigner, role: Role) -> PeerIdentity:
        return PeerIdentity(CLUSTER, role, member_id(signer.public_key))

    async def start(
        self, *, impostor: int | None = None, thief: int | None = None, lifetime: int = 3600
    ) -> None:
        """`impostor`: the rank at whose address another valid member answers.

        `thief`: the rank at whose address somebody answers with a certificate for the member's name, made
        with the authority's stolen key, and an identity key of his own.

        `lifetime`: of the gateway's certificate, in seconds, half of it over.
        """
        for rank in range(self.size):
            signer = self.members[rank] if rank != impostor else SoftwareSigner.generate()
            store = TlsStore(self.material(self.peer(signer, Role.MEMBER)))
            own = member_id(signer.public_key)
            signer = signer if rank != thief else SoftwareSigner.generate()
            member = ActedMember(self, rank, signer, own)
            server = Server([(control_grpc.add_ControlServicer_to_server, member, "sealring.v1.Control")])
            self.ports.append(server.listen("127.0.0.1:0", server_credentials(store)))
            await server.start()
            self._servers.append(server)
        store = TlsStore(self.material(PeerIdentity(CLUSTER, Role.COORDINATOR, "coordinator")))
        server = Server(self.coordinator.services())
        port = server.listen("127.0.0.1:0", server_credentials(store))
        await server.start()
        self._servers.append(server)
        self._enrol_gateway(port, lifetime)
        self.publish()
        self.serve()

    def _enrol_gateway(self, port: int, lifetime: int) -> None:
        peer = self.peer(self.gateway, Role.GATEWAY)
        RosterStateFile(self.state_dir / ROSTER_STATE).create(CLUSTER)
        write_atomic(self.state_dir / ROSTER, self.sign())
        material = self.material(peer, lifetime)
        coordinator = f"127.0.0.1:{port}"
        self.authority.enrol(self.state_dir, peer, material, name="gateway", coordinator=coordinator)

    def sign(self, *, ago: int = 0, **changes: Any) -> bytes:
        """The next roster, signed `ago` seconds ago; it is valid for ten minutes."""
        now = int(time.time()) - ago
        self.version += 1
        members = [
            make_member(
                signer, sealing_key=bytes([rank + 1]) * 32, addresses=(f"127.0.0.1:{self.ports[rank]}",)
            )
            for rank, signer in enumerate(self.members)
        ]
        places = tuple(RingMember(member.id, rank, (rank, rank + 1)) for rank, member in enumerate(members))
        plan = {"deployment": "echo", "model": "echo", "context": CONTEXT}
        named = {
            "version": self.version,
            "previous": self.previous,
            "gateways": (Gateway(member_id(self.gateway.public_key), self.gateway.public_key),),
        }
        ring = make_ring(members, "ring-0", total_layers=self.size, members=places, **plan)
        envelope = self.authority.sign(make_roster(CLUSTER, members, [ring], now=now, **named | changes))
        self.previous = check_roster(envelope, self.authority.root, now=now).hash
        return envelope

    def publish(self, **changes: Any) -> None:
        self.publish_raw(self.sign(**changes))

    def publish_raw(self, envelope: bytes) -> None:
        update = membership.RosterUpdate(envelope=envelope)
        self.coordinator.tell(membership.WatchResponse(roster=update), name="roster")

    def serve(self, phase: int = membership.RING_PHASE_SERVING, *, patience: int = 0) -> None:
        state = membership.RingState(
            ring="ring-0",
            epoch=self.ring.epoch,
            phase=phase,
            deployment="echo",
            max_rows=8,
            context=CONTEXT,
            prefill_chunk=CHUNK,
            model_type="llama",
            protocol=PROTOCOL_VERSION,
            patience=patience,
        )
        self.coordinator.tell(membership.WatchResponse(ring=state), name="ring")

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(0)


@pytest.fixture
async def make_cluster(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(size: int = 3, **options: Any) -> ActedCluster:
            cluster = ActedCluster(tmp_path / f"cluster-{size}", size)
            stack.push_async_callback(cluster.stop)
            await cluster.start(**options)
            return cluster

        yield make
