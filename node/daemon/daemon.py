"""The node daemon: one enrolled member, its session with the coordinator, and its seats in rings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from sealring.mesh.crypto.identity import Signer
from sealring.mesh.errors import (
    EpochEnded,
    FailedPrecondition,
    ModelError,
    NotFound,
    SealringError,
    Unavailable,
)
from sealring.mesh.member.certificate_keeper import CertificateKeeper
from sealring.mesh.member.introduction import Introduction
from sealring.mesh.member.proof import Identity, Purpose, by_identity
from sealring.mesh.member.roster_keeper import RosterKeeper, removed
from sealring.mesh.member.state import MachineState
from sealring.mesh.pki.certificates import Role, role_server_name
from sealring.mesh.prompt.sealed import SealingKey
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.rpc.protocol import software_version
from sealring.mesh.rpc.tls import PeerChannel, TlsStore
from sealring.mesh.trust.attestation import sign_sealing_key
from sealring.node.daemon.awake import Awake
from sealring.node.daemon.diagnosis import Diagnosis
from sealring.node.daemon.doing import Doing, note_doing
from sealring.node.daemon.engines import EngineKeeper
from sealring.node.daemon.epoch import MemberEpoch, Phase
from sealring.node.daemon.fetching import Fetcher, no_layers
from sealring.node.daemon.memory import MemoryMeter
from sealring.node.daemon.plan import plan_epoch
from sealring.node.daemon.sealed_rows import Unsealer
from sealring.node.daemon.seat import Seat, Surroundings
from sealring.node.daemon.session import CoordinatorSession
from sealring.node.identity.challenge import Prover
from sealring.node.link.exchange import Handshakes
from sealring.node.models.asking import ModelAsker
from sealring.node.models.giving import ModelGiver
from sealring.node.settings import NodeSettings
from sealring.node.wire.timelog import now
from sealring.v1 import membership_pb2

log = structlog.get_logger()

_LOOK_SECONDS = 2.0
_MODELS_SECONDS = 10.0


class Daemon:
    """What `node/main.py` runs. Implements the interfaces of session and control service."""

    def __init__(self, settings: NodeSettings, state: MachineState, signer: Signer) -> None:
        """Raises RosterError when the memory of earlier rosters is not usable."""
        self.store = TlsStore(state.tls)
        self._settings = settings
        self._own_id = state.peer.id
        self._cluster = state.peer.cluster
        self._signer = signer
        self._sealing_key = SealingKey(hybrid=settings.hybrid_sealing_key)
        self._addresses: tuple[str, ...] = ()
        self._seats: dict[str, Seat] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._removed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._run_folder = settings.state_dir / "run"
        self._instance = secrets.token_bytes(16)
        self._unsaved: tuple[bytes, SealringError] | None = None
        self._awake = Awake()
        self._doing: Doing | None = None
        self._meter = MemoryMeter(settings.memory_limit)
        self._rosters = RosterKeeper(settings.state_dir, state)
        fetched = settings.state_dir / "models"
        folders = (*settings.models, fetched)
        notes = settings.state_dir / "manifests"
        self.models = ModelGiver(self._cluster, folders, notes, lambda: self._rosters.valid)
        asker = ModelAsker(self._cluster, self._own_id, self.store, lambda: self._rosters.valid)
        self._fetcher = Fetcher(folders, fetched, asker, allowed=settings.allow_downloads)
        self._engines = EngineKeeper(folders, self._meter, self._fetcher)
        self.handshakes = Handshakes(state.peer.cluster, signer, self.store, revoked=self._rosters.revoked)
        self._around = Surroundings(
            self._own_id,
            settings.ring_host,
            settings.rdma_devices,
            self._run_folder,
            self._rosters,
            self.handshakes,
            self._engines,
            self.report,
        )
        self.unsealer = Unsealer(self._sealing_key, self._own_id, clock=self._rosters.now)
        name = role_server_name(Role.COORDINATOR)
        self._channel = PeerChannel(state.coordinator, self.store, name)
        self._prover = Prover(
            self._cluster,
            signer,
            self._sealing_key.public_key,
            self._served_models,
            serial=settings.device_attestation is not None,
        )
        self._certificates = CertificateKeeper(
            settings.state_dir, state, self.store, signer, self._channel, self._rosters.follow_root
        )
        self.identity = Identity(self._cluster, self._own_id, by_identity(signer), lambda: self._rosters.held)
        introduction = Introduction(
            Purpose.SESSION,
            self.identity,
            self._channel,
            lambda: self._rosters.root,
            self._certificates.renew,
        )
        self._session = CoordinatorSession(
            self._channel, introduction, self, lambda: self._rosters.coordinators
        )
        self.diagnosis = Diagnosis(
            settings, self._own_id, lambda: self._rosters.valid, lambda: self._session.connected
        )

    async def run(self, addresses: tuple[str, ...], stop: asyncio.Event) -> None:
        """Works until `stop` is set. Raises PermissionDenied (REMOVED) once the node is out of the roster.

        Either way nothing is left when it returns: no process, no file, and the coordinator knows.
        """
        self._addresses = addresses
        shutil.rmtree(self._run_folder, ignore_errors=True)
        self._rosters.load()
        loop = asyncio.get_running_loop()
        work: list[asyncio.Future[Any]] = [
            loop.create_task(self._session.run()),
            loop.create_task(self._certificates.run()),
            loop.create_task(self._look()),
            loop.create_task(self._look_for_models()),
            self._removed,
        ]
        stopped = loop.create_task(stop.wait())
        try:
            await asyncio.wait((stopped, *work), return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            await self._stop("removed" if self._removed.done() else "stopping")
            for task in (stopped, *work):
                task.cancel()
            await asyncio.wait((stopped, *work))
            await self._channel.close()

    # Session: what is said to the coordinator

    def hello(self) -> membership_pb2.Hello:
        key = self._sealing_key.public_key
        return membership_pb2.Hello(
            software_version=software_version(),
            instance=self._instance,
            addresses=self._addresses,
            sealing_key=key,
            sealing_key_signature=sign_sealing_key(self._signer, self._cluster, key),
            roster_version=self._rosters.version,
            serving=[told for seat in self._seats.values() if (told := seat.serving()) is not None],
        )

    def heartbeat(self) -> membership_pb2.Heartbeat:
        return membership_pb2.Heartbeat(
            memory_total=self._meter.total,
            memory_usable=self._meter.usable,
            memory_used=self._engines.memory_used,
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
            rings=[told for seat in self._seats.values() if (told := seat.health()) is not None],
            models=self._fetcher.messages(),
            memory_overhead=self._meter.overhead,
        )

    def report(self, message: membership_pb2.MemberMessage) -> None:
        """Queues what an epoch has to say; progress is of interest only while somebody listens."""
        if self._session.connected or message.WhichOneof("message") != "progress":
            self._session.send(message)

    # Session: what the coordinator says

    async def from_coordinator(self, message: membership_pb2.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "roster":
            await self._take_roster(message.roster.envelope)
        elif kind == "profile":
            self._go(self._profile(message.profile))
        elif kind == "challenge":
            self._go(self._prove(message.challenge))
        elif kind == "trace":
            self._trace(message.trace)
        elif kind == "diagnose":
            self._go(self._diagnose(message.diagnose))
        elif kind == "change_model":
            self._go(self._change_model(message.change_model))
        elif kind == "prepare":
            self._prepare(message.prepare)
        elif kind == "commit":
            self._commit(message.commit)
        elif kind == "end":
            self._end(message.end)
        elif kind == "goodbye":
            log.info("coordinator_goodbye", reason=message.goodbye.reason[:80])

    def thrown_out(self) -> None:
        """The coordinator does not know this node any more."""
        if not self._removed.done():
            self._removed.set_exception(removed())

    async def _take_roster(self, envelope: bytes) -> None:
        try:
            roster = await self._rosters.accept(envelope, self._certificates.renew)
        except SealringError as error:
            if error.reason == "REMOVED":
                self.thrown_out()
            elif error.reason == "ROSTER_STATE_UNWRITABLE":
                self._unsaved = envelope, error
            self._report_equivocation()
            raise
        self._unsaved = None
        self.unsealer.learn(roster)
        self.handshakes.close_revoked()
        seen = membership_pb2.RosterSeen(version=roster.version, hash=roster.hash)
        self._session.send(membership_pb2.MemberMessage(roster_seen=seen))
        for seat in list(self._seats.values()):
            self._check_seat(seat, roster)
        await self._awake.hold(bool(roster.rings_of(self._own_id)))

    def _report_equivocation(self) -> None:
        """Tells the coordinator which roster this node holds of a version that was signed twice."""
        found = self._rosters.equivocation
        if found is not None:
            seen = membership_pb2.RosterSeen(version=found.version, hash=found.known)
            self._session.send(membership_pb2.MemberMessage(roster_seen=seen))

    def _check_seat(self, seat: Seat, roster: Roster) -> None:
        """A newer roster may have taken away the ring, one of its members, or its gateway."""
        epoch = seat.epoch
        if epoch is None:
            return
        ring = next((one for one in roster.rings_of(self._own_id) if one.id == seat.ring), None)
        gateway = epoch.gateway
        if ring is None:
            epoch.end("the ring is not in the roster any more")
            self._go(self._vacate(seat, epoch))
        elif ring.members != epoch.plan.members:
            epoch.fault(EpochEnded("the ring has other members now", reason="RING_CHANGED"))
        elif gateway is not None and all(gateway.id != one.id for one in roster.gateways):
            epoch.fault(EpochEnded("the gateway is not in the roster any more", reason="GATEWAY_REMOVED"))
        else:
            epoch.dismiss({one.id for one in roster.gateways}, "GATEWAY_REMOVED")

    async def _profile(self, request: membership_pb2.ProfileRequest) -> None:
        result = membership_pb2.ProfileResult(id=request.id)
        try:
            result.profile.CopyFrom(await self._engines.profile(request.model, request.ranks))
        except SealringError as error:
            result.problem.CopyFrom(to_problem(error))
        except Exception as error:
            log.error("profile_failed", exc_info=error)
            result.problem.CopyFrom(to_problem(error))
        self._session.send(membership_pb2.MemberMessage(profile=result))

    async def _prove(self, challenge: membership_pb2.Challenge) -> None:
        answer = await self._prover.answer(challenge)
        if answer is not None:
            self._session.send(answer)

    async def _diagnose(self, question: membership_pb2.DiagnosisQuestion) -> None:
        answer = membership_pb2.DiagnosisAnswer(id=question.id, asked=time.time_ns())
        try:
            answer.report = await self.diagnosis.report()
        except SealringError as error:
            answer.problem.CopyFrom(to_problem(error))
        except Exception as error:
            log.error("report_failed", exc_info=error)
            answer.problem.CopyFrom(to_problem(error))
        answer.answered = time.time_ns()
        self._session.send(membership_pb2.MemberMessage(diagnosis=answer))

    async def _change_model(self, asked: membership_pb2.ChangeModel) -> None:
        """Removes a model, or begins to fetch one; how that goes on is in the heartbeats."""
        answer = membership_pb2.ModelChanged(id=asked.id)
        try:
            if asked.remove:
                await self._remove_model(asked.model)
            else:
                self._fetcher.begin(asked.model, no_layers if asked.to_plan else None)
        except SealringError as error:
            answer.problem.CopyFrom(to_problem(error))
        except Exception as error:
            log.error("model_not_changed", exc_info=error)
            answer.problem.CopyFrom(to_problem(error))
        self._session.send(membership_pb2.MemberMessage(model_changed=answer))

    async def _remove_model(self, name: str) -> None:
        await self._fetcher.remove(name, self._models_in_use)
        await self._fetcher.look()

    def _models_in_use(self) -> list[Path]:
        """The folders of models that are loaded, or may be for an epoch that has begun."""
        stages = [seat.stage for seat in self._seats.values() if seat.stage is not None]
        epochs = [
            seat.epoch
            for seat in self._seats.values()
            if seat.epoch is not None and seat.phase is not Phase.ENDED
        ]
        names = {epoch.plan.model for epoch in epochs}
        names |= {name.rpartition("/")[2] for name in names if not name.startswith("/")}
        return [*(Path(stage.path) for stage in stages), *map(self._fetcher.place, sorted(names))]

    async def _look_for_models(self) -> None:
        while True:
            await self._fetcher.look()
            await asyncio.sleep(_MODELS_SECONDS)

    async def _served_models(self) -> tuple[bytes, ...]:
        """The digest of the model of each ring that it serves, by the files as they are now; zeros where
        files are gone. Two rings whose files are alike state it twice: the coordinator counts them."""
        stages = [seat.stage for seat in self._seats.values() if seat.phase is Phase.UP]
        digests = [await self._digest(stage.path) for stage in stages if stage is not None]
        return tuple(sorted(digest for digest in digests if digest is not None))

    async def _digest(self, path: str) -> bytes | None:
        """None where nobody can tell now: the weights are in memory, and the ring goes on."""
        try:
            return bytes.fromhex((await self._engines.profile(path)).digest)
        except (NotFound, ModelError):
            return bytes(32)
        except Unavailable as error:
            if error.reason != "MODEL_FOLDER_UNREADABLE":
                raise
            log.warning("served_model_unreadable", why=error.message)
            return None

    def _trace(self, question: membership_pb2.TraceQuestion) -> None:
        """A question with no window is one about the clock, and answered at once."""
        answer = membership_pb2.TraceAnswer(id=question.id, asked=now())
        if question.window:
            self._go(self._collect_trace(question, answer))
        else:
            self._send_trace(answer)

    async def _collect_trace(
        self, question: membership_pb2.TraceQuestion, answer: membership_pb2.TraceAnswer
    ) -> None:
        try:
            epoch = self.serving_epoch(question.ring, question.epoch)
            answer.processes.extend(await epoch.trace(max(0, answer.asked - question.window)))
        except SealringError as error:
            answer.problem.CopyFrom(to_problem(error))
        self._send_trace(answer)

    def _send_trace(self, answer: membership_pb2.TraceAnswer) -> None:
        answer.answered = now()
        self._session.send(membership_pb2.MemberMessage(trace=answer))

    def _prepare(self, prepare: membership_pb2.PrepareEpoch) -> None:
        try:
            if self._unsaved is not None:
                raise self._unsaved[1]
            plan = plan_epoch(prepare, self._rosters.current, self._own_id)
            seat = self._seats.get(plan.ring) or Seat(plan.ring, self._around)
            seat.prepare(plan, prepare)
        except SealringError as error:
            self._refuse(prepare.ring, prepare.epoch, error)
            return
        self._seats[plan.ring] = seat

    def _commit(self, commit: membership_pb2.CommitEpoch) -> None:
        epoch = self._named(commit.ring, commit.epoch)
        if epoch is not None:
            epoch.commit(commit.group_addresses)
        else:
            self._refuse(commit.ring, commit.epoch, NotFound("no such epoch", reason="NO_SUCH_EPOCH"))

    def _end(self, end: membership_pb2.EndEpoch) -> None:
        seat, epoch = self._seats.get(end.ring), self._named(end.ring, end.epoch)
        if seat is None or epoch is None:
            return
        epoch.end(end.reason[:80])
        if end.unload:
            self._go(self._vacate(seat, epoch))

    def _named(self, ring: str, number: int) -> MemberEpoch | None:
        seat = self._seats.get(ring)
        return seat.named(number) if seat is not None else None

    def _refuse(self, ring: str, number: int, error: SealringError) -> None:
        log.warning("epoch_refused", ring=ring[:64], epoch=number, reason=error.reason)
        fault = membership_pb2.EpochFault(ring=ring, epoch=number, problem=to_problem(error))
        self._session.send(membership_pb2.MemberMessage(fault=fault))

    # Control service

    def gateway_key(self, cluster: str, identifier: str) -> bytes:
        return self._rosters.gateway_key(cluster, identifier)

    def authorities(self) -> tuple[bytes, ...]:
        return self._rosters.root.authorities

    def serving_epoch(self, ring: str, epoch: int) -> MemberEpoch:
        found = self._named(ring, epoch)
        if found is None:
            raise FailedPrecondition(
                "this node does not serve that epoch",
                hint="attach to the current epoch",
                reason="EPOCH_NOT_SERVING",
            )
        return found

    # The daemon's own

    async def _look(self) -> None:
        """Notes what the node does; an expired roster closes open links, also with the coordinator away."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._take_unsaved()
            doing = Doing(
                self._session.connected, {seat.ring: seat.phase.value for seat in self._seats.values()}
            )
            if doing != self._doing:
                self._doing = doing
                await asyncio.to_thread(note_doing, self._settings.state_dir, doing)
            for seat in self._seats.values():
                if seat.epoch is not None and seat.phase is not Phase.ENDED and self._rosters.expired:
                    seat.epoch.fault(self._unsaved[1] if self._unsaved is not None else self._rosters.lapse())

    async def _take_unsaved(self) -> None:
        """The disk may have room by now for the roster that could not be remembered, so is not used yet."""
        if self._unsaved is not None:
            with contextlib.suppress(SealringError):
                await self._take_roster(self._unsaved[0])

    async def _vacate(self, seat: Seat, epoch: MemberEpoch) -> None:
        await seat.vacate(epoch)
        if seat.epoch is None and self._seats.get(seat.ring) is seat:  # or another began meanwhile
            del self._seats[seat.ring]

    async def _stop(self, reason: str) -> None:
        epochs = [seat.epoch for seat in self._seats.values() if seat.epoch is not None]
        for epoch in epochs:
            if epoch.gateway is not None:
                epoch.gateway.say_goodbye(reason)
            epoch.fault(Unavailable("the node stops", reason="NODE_STOPPING"))
        await asyncio.gather(*(epoch.closed() for epoch in epochs))
        await self._session.goodbye(reason)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._fetcher.stop()
        await self.models.stop()
        await self._engines.stop()
        await self._awake.hold(False)
        with contextlib.suppress(OSError):
            shutil.rmtree(self._run_folder, ignore_errors=True)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("daemon_task_failed", exc_info=error)
