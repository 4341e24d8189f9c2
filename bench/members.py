"""Cost of many members to the coordinator, and the time until all of them have a new roster.

The coordinator is a process of its own with mTLS and SQLite; its share of a core is its own CPU time. The
members are scripted: each has an identity, a certificate and a session, sends a heartbeat every 2 s and
answers challenges, five times as often as by default. They do not check rosters. Each change sends one, timed
from the operator's call to each member. Targets: half a core, and p99 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import numpy as np
import psutil  # type: ignore[import-untyped]

from bench.frame import Result, Table, progress
from bench.verdict import Check
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.main import run as run_coordinator
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.mesh.crypto import KeyType, Label, SoftwareSigner, member_id
from sealring.mesh.errors import SealringError
from sealring.mesh.member import CallerProof, Connection, HeldRoster, Purpose, load_machine_state
from sealring.mesh.pki import LeafKey, PeerIdentity, Role, TlsMaterial, key_hash, role_server_name
from sealring.mesh.rpc import channel_options, secure_channel
from sealring.mesh.system.addresses import free_port
from sealring.mesh.trust.attestation import Statement, encode_statement, sign_sealing_key, sign_statement
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import admin_pb2, admin_pb2_grpc
from sealring.v1 import membership_pb2 as membership
from sealring.v1 import membership_pb2_grpc as membership_grpc
from sealring.v1.membership_pb2 import MemberMessage

CLUSTER, CORE, P99_SECONDS = "bench", 0.5, 2.0
HEARTBEAT_SECONDS = 2.0
_AT_ONCE = 16
QUICK = ("--members", "50", "--seconds", "5", "--rosters", "3")


@dataclass
class Member:
    """One that says what a node says; `rosters` are the times at which it got one."""

    signer: SoftwareSigner
    tls: TlsMaterial
    sealing_key: bytes

    def __post_init__(self) -> None:
        self.id = member_id(self.signer.public_key)
        self.rosters: list[float] = []
        self.challenges = 0
        self._instance = secrets.token_bytes(16)
        self._writing = asyncio.Lock()
        self._call: Any = None

    def statement(self, nonce: bytes) -> Statement:
        key, kind = self.signer.public_key, KeyType(self.signer.key_type)
        return Statement(CLUSTER, nonce, int(time.time()), key, kind, self.sealing_key, bytes(32))

    async def _say(self, **what: Any) -> None:
        async with self._writing:
            await self._call.write(MemberMessage(**what))

    async def come(self, address: str) -> None:
        options = [
            *channel_options(role_server_name(Role.COORDINATOR)),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        channel = secure_channel(address, self.tls, options)
        self._call = membership_grpc.MembershipStub(channel).Session()
        own = Connection(Purpose.SESSION, CLUSTER, self.id, "", key_hash(self.tls.certificate))
        proof = CallerProof(own, HeldRoster())
        await self._say(offer=proof.offer)
        proof.check((await self._call.read()).proof, lambda content, given: None)
        await self._say(proof=await proof.finish(lambda content: self.signer.sign(Label.CONNECTION, content)))
        await self._call.read()
        await self._say(
            hello=membership.Hello(
                software_version="bench",
                instance=self._instance,
                addresses=["127.0.0.1:7999"],
                sealing_key=self.sealing_key,
                sealing_key_signature=sign_sealing_key(self.signer, CLUSTER, self.sealing_key),
            )
        )

    async def beat(self) -> None:
        while True:
            await self._say(heartbeat=membership.Heartbeat(memory_total=2 << 30, memory_usable=1 << 30))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def listen(self) -> NoReturn:
        """Raises RuntimeError, or what the stream ended with: it must not end."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if message.HasField("roster"):
                self.rosters.append(time.monotonic())
            elif message.HasField("challenge"):
                self.challenges += 1
                said = sign_statement(self.signer, self.statement(message.challenge.nonce), Label.CHALLENGE)
                answer = membership.ChallengeAnswer(statement=said[0], signature=said[1])
                await self._say(challenge_answer=answer)
        raise RuntimeError("the coordinator ended a session")


def enrolled(settings: CoordinatorSettings, count: int) -> list[Member]:
    """Members in the coordinator's store, as if each had joined."""
    now = time.time()
    init(settings)
    keys, store = ClusterKeys.load(settings, now=now), Store.open(settings.state_dir)
    made = []
    with store.transaction():
        for number in range(count):
            leaf, signer = LeafKey(), SoftwareSigner.generate()
            peer = PeerIdentity(CLUSTER, Role.MEMBER, member_id(signer.public_key))
            certificate = keys.ca.issue(leaf.csr(), peer, lifetime=24 * 3600, now=now)
            tls = TlsMaterial(leaf.private_pem(), certificate, keys.root.authorities)
            member = Member(signer, tls, secrets.token_bytes(32))
            made.append(member)
            store.members.enrol(
                StoredMember(
                    id=member.id,
                    role=Role.MEMBER,
                    name=f"node-{number}",
                    identity_key=signer.public_key,
                    key_type=KeyType.SOFTWARE,
                    enrolled_at=int(now),
                    sealing_key=member.sealing_key,
                    level=TrustLevel.SOFTWARE,
                    trust=10,
                    attestation=b"{}",
                    attested_at=int(now),
                    challenged_at=int(now),
                    manifest_hash=bytes(32),
                    addresses=("127.0.0.1:7999",),
                    software_version="bench",
                    evidence=encode_statement(member.statement(bytes(32))),
                )
            )
    store.close()
    return made


def serve(settings: CoordinatorSettings) -> None:
    """The coordinator's process."""
    _allow_files()
    asyncio.run(run_coordinator(settings))


def _allow_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def drained(settings: CoordinatorSettings, member: Member) -> float:
    """Has a new roster made; when it was asked for."""
    tls = load_machine_state(settings.state_dir / "operator").tls
    options = channel_options(role_server_name(Role.COORDINATOR))
    async with secure_channel(settings.listen, tls, options) as channel:
        begun = time.monotonic()
        await admin_pb2_grpc.AdminStub(channel).EvictNode(
            admin_pb2.EvictNodeRequest(id=member.id), timeout=60
        )
    return begun


async def measure(
    settings: CoordinatorSettings, members: list[Member], options: argparse.Namespace
) -> Result:
    serving = multiprocessing.get_context("spawn").Process(target=serve, args=(settings,))
    serving.start()
    try:
        process = psutil.Process(serving.pid)
        async with asyncio.timeout(600):
            return await measure_sessions(settings, members, process, options)
    finally:
        serving.terminate()
        serving.join(60)


async def measure_sessions(
    settings: CoordinatorSettings, members: list[Member], process: psutil.Process, options: argparse.Namespace
) -> Result:
    """Raises an ExceptionGroup of why a session ended, as soon as one does."""
    async with asyncio.TaskGroup() as sessions:
        return await _measure_rosters(settings, members, process, options, sessions)


async def _measure_rosters(
    settings: CoordinatorSettings,
    members: list[Member],
    process: psutil.Process,
    options: argparse.Namespace,
    sessions: asyncio.TaskGroup,
) -> Result:
    gate = asyncio.Semaphore(_AT_ONCE)
    tasks: list[asyncio.Task[None]] = []

    async def come(member: Member) -> None:
        async with gate:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, SealringError, asyncio.InvalidStateError):
                    await member.come(settings.listen)
                    break
                await asyncio.sleep(0.2)
        tasks.extend(sessions.create_task(work) for work in (member.beat(), member.listen()))

    staying, spare = members[options.rosters :], members[: options.rosters]
    begun, used = time.monotonic(), cpu(process)
    await asyncio.gather(*map(come, staying))
    coming = {"seconds": time.monotonic() - begun, "cpu": cpu(process) - used}
    progress(f"{len(staying)} members are there after {coming['seconds']:.0f} s")
    await asyncio.sleep(2 * HEARTBEAT_SECONDS)
    answered = sum(member.challenges for member in staying)
    begun, used = time.monotonic(), cpu(process)
    await asyncio.sleep(options.seconds)
    cores = (cpu(process) - used) / (time.monotonic() - begun)
    answered = sum(member.challenges for member in staying) - answered
    delays: list[float] = []
    used = cpu(process)
    for member in spare:
        counts = [len(one.rosters) for one in staying]
        asked = await drained(settings, member)
        while any(len(one.rosters) <= count for one, count in zip(staying, counts, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        delays += [one.rosters[count] - asked for one, count in zip(staying, counts, strict=True)]
    result = {
        "members": len(staying),
        "heartbeats_a_second": len(staying) / HEARTBEAT_SECONDS,
        "challenges_a_second": round(answered / options.seconds, 1),
        "cores": round(cores, 3),
        "roster_cpu_seconds": round((cpu(process) - used) / max(1, options.rosters), 3),
        "propagation_p50": round(float(np.median(delays)), 3),
        "propagation_p99": round(float(np.percentile(delays, 99)), 3),
        "coming_cpu_milliseconds": round(1000 * coming["cpu"] / len(staying), 1),
        "memory_mib": round(process.memory_info().rss / 2**20),
    }
    for task in tasks:
        task.cancel()
    return result


def cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=int, default=60, help="how long nothing but beats and challenges come"
    )
    parser.add_argument("--rosters", type=int, default=5, help="changes, each a new roster for all")


async def run(options: argparse.Namespace) -> Result:
    _allow_files()
    with tempfile.TemporaryDirectory() as folder:
        settings = CoordinatorSettings(
            state_dir=Path(folder) / "state",
            cluster=CLUSTER,
            listen=f"127.0.0.1:{free_port()}",
            join_listen=f"127.0.0.1:{free_port()}",
            software_identity_allowed=True,
            challenge_interval=60,
        )
        members = enrolled(settings, options.members)
        progress(f"{len(members)} members are enrolled")
        return await measure(settings, members, options)


def tables(result: Result) -> list[Table]:
    names = {
        "members": "members",
        "cores": "cores",
        "challenges_a_second": "challenges/s",
        "roster_cpu_seconds": "CPU s per roster",
        "propagation_p50": "roster at half, s",
        "propagation_p99": "p99, s",
        "coming_cpu_milliseconds": "CPU ms per session",
        "memory_mib": "MiB",
    }
    return [Table("Coordinator under many members", list(names.values()), [[result[name] for name in names]])]


def checks(result: Result) -> list[Check]:
    return [
        Check("cores for heartbeats and challenges", [result["cores"]], CORE),
        Check("seconds until 99 of 100 have a roster", [result["propagation_p99"]], P99_SECONDS),
    ]
