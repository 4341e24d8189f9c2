"""A real coordinator on loopback, an operator, and nodes of the tests that speak the real protocol."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prooftest import identity, introduce

from sealring.coordinator.init import init
from sealring.coordinator.main import Coordinator
from sealring.coordinator.nodes.questions import Questions
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.crypto import KeyType, Label, SoftwareSigner
from sealring.mesh.errors import ModelError, SealringError
from sealring.mesh.member import (
    IDENTITY_KEY,
    ROSTER_STATE,
    Enrolled,
    NodeEvidence,
    Purpose,
    enrol,
    load_machine_state,
)
from sealring.mesh.pki import Role, role_server_name
from sealring.mesh.roster import Roster, RosterReader, whole_roster
from sealring.mesh.rpc import channel_options, from_rpc_error, own_release, secure_channel, to_problem
from sealring.mesh.trust.attestation import Statement, sign_sealing_key, sign_statement
from sealring.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    model_pb2,
    proof_pb2,
)

GIB = 1 << 30
LAYERS = 9
SERVING = membership_pb2.RING_PHASE_SERVING
DOWN = membership_pb2.RING_PHASE_DOWN


def small_profile(digest: str = "ab" * 32) -> model_pb2.ModelProfile:
    """A model of nine layers that fits anywhere."""
    return model_pb2.ModelProfile(
        model_type="llama",
        layers=LAYERS,
        layer_bytes=[1000] * LAYERS,
        embed_bytes=500,
        head_bytes=500,
        kv_bytes_per_token=[8] * LAYERS,
        kv_max_tokens=[0] * LAYERS,
        state_bytes=[0] * LAYERS,
        max_context=512,
        digest=digest,
        hidden_size=64,
        vocab_size=1,
        dtype="float32",
        card={"parameters": 2500, "precision": "float32"},
    )


@dataclass
class Cluster:
    """A coordinator with the operator's stub, and helpers to join it."""

    settings: CoordinatorSettings
    folder: Path
    coordinator: Coordinator
    admin: admin_pb2_grpc.AdminStub = field(init=False)
    _channel: grpc.aio.Channel | None = None
    nodes: list[FakeNode] = field(default_factory=list)
    closed: bool = False

    def connect_operator(self) -> None:
        state = load_machine_state(self.settings.state_dir / "operator")
        self._channel = channel_to(self.coordinator.main_address(), state.tls)
        self.admin = admin_pb2_grpc.AdminStub(self._channel)

    async def call(self, method: str, request: Any) -> Any:
        """An admin call; raises the error of the tree."""
        try:
            return await getattr(self.admin, method)(request, timeout=200)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def token(self, role: int = membership_pb2.ROLE_NODE, ttl: int = 0) -> str:
        request = admin_pb2.CreateJoinTokenRequest(role=role, ttl_seconds=ttl)  # type: ignore[arg-type]
        answer = await self.call("CreateJoinToken", request)
        return str(answer.token)

    @property
    def join_address(self) -> str:
        return f"127.0.0.1:{self.coordinator.join_port}"

    async def join(
        self,
        name: str,
        *,
        token: str | None = None,
        role: Role = Role.MEMBER,
        signer: Any = None,
        folder: str | None = None,
        **brings: Any,
    ) -> Enrolled:
        state_dir = self.folder / (folder or name)
        number = membership_pb2.ROLE_NODE if role is Role.MEMBER else membership_pb2.ROLE_GATEWAY
        return await enrol(
            token=token or await self.token(number),
            role=role,
            signer=signer or SoftwareSigner.load_or_create(state_dir / IDENTITY_KEY),
            state_dir=state_dir,
            name=name,
            evidence=evidence(**brings) if role is Role.MEMBER else None,
        )

    async def node(self, name: str, *, join: bool = True, **options: Any) -> FakeNode:
        """An enrolled node with an open session."""
        if join:
            await self.join(name)
        node = FakeNode(self.folder / name, self.coordinator.main_address(), **options)
        self.nodes.append(node)
        await node.start()
        return node

    async def back(self, node: FakeNode) -> FakeNode:
        """A node that went on by itself without a coordinator, as busy as it was."""
        again = FakeNode(self.folder / node.name, self.coordinator.main_address(), instance=node.instance)
        again.running, again.serving, again.busy = dict(node.running), dict(node.serving), node.busy
        self.nodes.append(again)
        await again.start()
        return again

    async def refusal(self, name: str) -> str:
        """Why a node that was enrolled gets no session."""
        node = FakeNode(self.folder / name, self.coordinator.main_address())
        call = membership_pb2_grpc.MembershipStub(node.channel).Session()
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await node.prove(call)
                await call.write(membership_pb2.MemberMessage(hello=node.hello()))
                await call.read()
        finally:
            call.cancel()
            await node.channel.close()
        return from_rpc_error(caught.value).reason

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for node in self.nodes:
            await node.stop()
        if self._channel is not None:
            await self._channel.close()
        await self.coordinator.stop()


class FakeNode:
    """A node that does everything but compute: it enrolled for real and speaks over real mTLS."""

    def __init__(
        self,
        state_dir: Path,
        address: str,
        *,
        profile: model_pb2.ModelProfile | None = None,
        memory: int = GIB,
        heartbeat: bool = True,
        prepare: bool = True,
        commit: bool = True,
        instance: bytes = b"",
        speaks: tuple[int, int] | None = None,
        measures: bool = False,
    ) -> None:
        self.measures = measures
        self.name = state_dir.name
        self.state = load_machine_state(state_dir)
        self.id = self.state.peer.id
        self.signer = SoftwareSigner.load(state_dir / IDENTITY_KEY)
        self.reader = RosterReader(self.state.root, state_dir / ROSTER_STATE, self.id)
        self._signed = b""
        self.profile = profile if profile is not None else small_profile()
        self.memory = memory
        self.beating = heartbeat
        self.prepares = prepare
        self.commits = commit
        self.running: dict[str, int] = {}
        self.group_address = "10.0.0.1:7000"
        self.serving: dict[str, membership_pb2.PrepareEpoch] = {}
        self.link = membership_pb2.LinkInfo(from_rank=0, to_rank=1, suite="test")
        self.release = own_release()
        if speaks is not None:
            self.release = proof_pb2.Release(software="test", oldest=speaks[0], protocol=speaks[1])
        self.answers = True
        self.parts = True
        self.profiles = True
        self.instance = instance or secrets.token_bytes(16)
        self.busy = False
        self.step_us = 0
        self.beats = 0
        self.steps = 0
        self.said: dict[str, Any] = {}
        self.messages: list[membership_pb2.CoordinatorMessage] = []
        self.error: SealringError | None = None
        self.sealing_key = secrets.token_bytes(32)
        self.channel = channel_to(address, self.state.tls)
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: Any = None

    async def start(self) -> None:
        self._call = membership_pb2_grpc.MembershipStub(self.channel).Session()
        await self.prove(self._call, release=self.release)
        await self.send(hello=self.hello())
        if self.beating:
            await self.beat()
            self._tasks.append(asyncio.create_task(self._beat_forever()))
        self._tasks.append(asyncio.create_task(self._read()))
        await self.wait_for("roster")

    async def prove(self, call: Any, request: Any = membership_pb2.MemberMessage, **options: Any) -> None:
        own = identity(self.signer, self.state.peer.cluster)
        self.proof = await introduce(
            call, request, own, self.state.tls.certificate, Purpose.SESSION, **options
        )

    def hello(self) -> membership_pb2.Hello:
        signature = sign_sealing_key(self.signer, self.state.peer.cluster, self.sealing_key)
        return membership_pb2.Hello(
            software_version="test",
            instance=self.instance,
            addresses=["127.0.0.1:7999"],
            sealing_key=self.sealing_key,
            sealing_key_signature=signature,
            measures=self.measures,
            serving=[
                membership_pb2.ServingEpoch(prepared=prepared, links=[self.link])
                for prepared in self.serving.values()
            ],
        )

    def answer(
        self, nonce: bytes, *, label: Label = Label.CHALLENGE, **changes: Any
    ) -> membership_pb2.ChallengeAnswer:
        """What it says to a challenge; `said` and `changes` replace fields of the statement."""
        values: dict[str, Any] = {
            "cluster": self.state.peer.cluster,
            "nonce": nonce,
            "timestamp": int(time.time()),
            "identity_key": self.signer.public_key,
            "key_type": KeyType(self.signer.key_type),
            "sealing_key": self.sealing_key,
            "manifest_hash": bytes(32),
            **self.said,
            **changes,
        }
        statement, signature = sign_statement(self.signer, Statement(**values), label)
        return membership_pb2.ChallengeAnswer(statement=statement, signature=signature)

    async def beat(self) -> None:
        self.steps += self.busy
        self.beats += 1
        step_us = self.step_us and self.step_us + self.beats % 7  # what does not change is no new reading
        rings = [
            membership_pb2.RingHealth(
                ring=ring,
                epoch=epoch,
                steps=self.steps,
                step_us=step_us,
            )
            for ring, epoch in self.running.items()
        ]
        heartbeat = membership_pb2.Heartbeat(
            memory_total=2 * self.memory,
            memory_usable=self.memory,
            memory_overhead=1,
            load=0.5,
            rings=rings,
            on_battery=True,
            low_power=True,
        )
        await self.send(heartbeat=heartbeat)

    async def send(self, **message: Any) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self._call.write(membership_pb2.MemberMessage(**message))

    def cut(self) -> None:
        """Breaks the stream."""
        self._call.cancel()

    async def part(self) -> None:
        """Ends its side of the stream, as who was said goodbye to does."""
        async with self._writing:
            await self._call.done_writing()

    async def wait_for(
        self, kind: str, check: Callable[[Any], bool] = lambda message: True, seconds: float = 200
    ) -> Any:
        """The first message of a kind that passes the check, seen or to come."""

        def find() -> Any:
            found = (getattr(one, kind) for one in self.messages if one.WhichOneof("message") == kind)
            return next((one for one in found if check(one)), None)

        async with self._changed:
            async with asyncio.timeout(seconds):
                await self._changed.wait_for(lambda: find() is not None)
        return find()

    async def wait_closed(self, seconds: float = 200) -> SealringError | None:
        """The error that the session ended with."""
        async with asyncio.timeout(seconds):
            await self._tasks[-1]
        return self.error

    async def ended_with(self) -> str:
        """The reason of the error that the session ended with."""
        error = await self.wait_closed()
        assert error is not None
        return error.reason

    @property
    def roster(self) -> Roster:
        return self.reader.current

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self.channel.close()

    async def _beat_forever(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await asyncio.sleep(0.1)
                if self.beating:
                    await self.beat()

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                await self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.InvalidStateError:
            pass

    async def _take(self, message: membership_pb2.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "roster":
            self._signed = whole_roster(message.roster, self._signed)
            self.reader.accept(self._signed)
        elif kind == "challenge" and self.answers:
            await self.send(challenge_answer=self.answer(message.challenge.nonce))
        elif kind == "profile" and self.profiles:
            await self.tell_profile(message.profile)
        elif kind == "change_model":
            await self.send(model_changed=membership_pb2.ModelChanged(id=message.change_model.id))
        elif kind == "prepare" and self.prepares:
            place = message.prepare
            assert self.roster.version >= place.roster_version
            await self.send(
                progress=membership_pb2.EpochProgress(
                    ring=place.ring, epoch=place.epoch, what="loading", fraction=0.5
                )
            )
            prepared = membership_pb2.EpochPrepared(ring=place.ring, epoch=place.epoch, links=[self.link])
            prepared.group_address = self.group_address if place.backend else ""
            await self.send(prepared=prepared)
        elif kind == "commit" and self.commits:
            self.running[message.commit.ring] = message.commit.epoch
            self.serving[message.commit.ring] = next(
                one.prepare
                for one in reversed(self.messages)
                if one.HasField("prepare") and one.prepare.ring == message.commit.ring
            )
            await self.send(up=membership_pb2.EpochUp(ring=message.commit.ring, epoch=message.commit.epoch))
        elif kind == "end":
            self.running.pop(message.end.ring, None)
            self.serving.pop(message.end.ring, None)
        elif kind == "goodbye" and self.parts:
            await self.part()
        async with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    async def tell_profile(self, request: membership_pb2.ProfileRequest) -> None:
        await self.send(profile=self._answer(request))

    def _answer(self, request: membership_pb2.ProfileRequest) -> membership_pb2.ProfileResult:
        if request.model != "demo":
            problem = to_problem(ModelError("there is no such model folder", reason="NO_MODEL"))
            return membership_pb2.ProfileResult(id=request.id, problem=problem)
        return membership_pb2.ProfileResult(id=request.id, profile=self.profile)


def evidence(**changes: Any) -> NodeEvidence:
    values: dict[str, Any] = {"manifest_hash": bytes(32), "addresses": ("127.0.0.1:7999",)}
    return NodeEvidence(sealing_key=secrets.token_bytes(32), **(values | changes))


def channel_to(address: str, material: Any) -> grpc.aio.Channel:
    options = channel_options(role_server_name(Role.COORDINATOR))
    return secure_channel(address, material, options)


def online() -> tuple[Questions, NodeSession]:
    """Questions to the node `alpha`, and its stream."""
    sessions = Sessions()
    session = NodeSession("alpha", bytes(16), clock=lambda: 0.0)
    sessions.open(session)
    return Questions(sessions), session


async def deploy(cluster: Cluster, **spec: Any) -> admin_pb2.DeploymentPlan:
    """Over three nodes if nothing else is asked for."""
    values: dict[str, Any] = {"name": "demo", "model": "demo"} | spec
    if not spec.keys() & {"stages", "split"}:
        values["stages"] = 3
    request = admin_pb2.CreateDeploymentRequest(spec=admin_pb2.DeploymentSpec(**values))
    plan: admin_pb2.DeploymentPlan = (await cluster.call("CreateDeployment", request)).plan
    return plan


async def ring_state(
    cluster: Cluster, phase: int, *, epoch: int = 0, deployment: int = 0
) -> admin_pb2.RingStatus:
    """The status of the first ring of the deployment with this number, by their names."""
    async with asyncio.timeout(200):
        while True:
            answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
            status: admin_pb2.RingStatus = answer.deployments[deployment].rings[0]
            if status.phase == phase and status.epoch >= epoch:
                return status
            await asyncio.sleep(0.05)


@pytest.fixture
async def start_cluster(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Cluster]]]:
    """Starts clusters, and closes them at the end."""
    running: list[Cluster] = []

    async def start(*, device_root: bytes | None = None, **changes: Any) -> Cluster:
        values: dict[str, Any] = {
            "state_dir": tmp_path / "coordinator",
            "cluster": "test",
            "listen": "127.0.0.1:0",
            "join_listen": "127.0.0.1:0",
            "heartbeat_timeout": 5.0,
            "replace_after": 3600,
            "software_identity_allowed": True,
        }
        settings = CoordinatorSettings(**(values | changes))
        if not settings.state_dir.exists():
            init(settings)
        options = {} if device_root is None else {"device_root": device_root}
        coordinator = Coordinator(settings, **options)
        await coordinator.start()
        cluster = Cluster(settings, tmp_path, coordinator)
        running.append(cluster)
        cluster.connect_operator()
        return cluster

    yield start
    for cluster in running:
        await cluster.close()


@pytest.fixture
async def cluster(start_cluster: Callable[..., Awaitable[Cluster]]) -> Cluster:
    return await start_cluster()
