"""The node daemon: one enrolled member, its session with the coordinator, and its seats in rings."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

from sealring.mesh.crypto.identity import Signer
from sealring.mesh.member.certificate_keeper import CertificateKeeper
from sealring.mesh.member.client import ClientKeeper
from sealring.mesh.member.coordinators import Coordinators, look_for_coordinator
from sealring.mesh.member.introduction import Introduction
from sealring.mesh.member.proof import Credentials, Purpose, by_identity
from sealring.mesh.member.roster_keeper import RosterKeeper, removed
from sealring.mesh.member.state import MachineState
from sealring.mesh.prompt.sealed import SealingKey
from sealring.mesh.rpc.tls import TlsStore
from sealring.mesh.system.paths import CLIENT_FOLDER
from sealring.node.daemon.awake import Awake
from sealring.node.daemon.cost_tables import CostTables
from sealring.node.daemon.diagnosis import Diagnosis
from sealring.node.daemon.engines import EngineKeeper, MemoryMeter
from sealring.node.daemon.epoch import MemberEpoch
from sealring.node.daemon.fetching import Fetcher
from sealring.node.daemon.handler import CoordinatorHandler
from sealring.node.daemon.measuring import Measuring
from sealring.node.daemon.model_keeper import ModelKeeper
from sealring.node.daemon.prefix_disks import PrefixDisks
from sealring.node.daemon.receipts import ReceiptKey
from sealring.node.daemon.roster_intake import RosterIntake
from sealring.node.daemon.sealed_rows import Unsealer
from sealring.node.daemon.seat import Seat, Surroundings
from sealring.node.daemon.seats import Background, Seats
from sealring.node.daemon.session import CoordinatorSession
from sealring.node.daemon.status import NodeStatus
from sealring.node.daemon.supervisor import Child, Spawn
from sealring.node.daemon.watch import Watch
from sealring.node.identity.challenge import Prover
from sealring.node.link.exchange import Handshakes
from sealring.node.models.asking import ModelAsker
from sealring.node.models.folders import LINKED
from sealring.node.models.giving import ModelGiver
from sealring.node.settings import NodeSettings
from sealring.node.stored.asking import BlocksAsker
from sealring.node.stored.giving import BlocksGiver
from sealring.node.stored.keys import FOLDER
from sealring.v1 import membership_pb2


class Daemon:
    """Builds the parts of a node daemon, runs them, and stops them in order.

    `node/main.py` serves its `handshakes`, `measuring`, `models`, `blocks` and `diagnosis`; the daemon itself
    is what the control service schedules.
    """

    def __init__(
        self, settings: NodeSettings, state: MachineState, signer: Signer, *, spawn: Spawn = Child.spawn
    ) -> None:
        """`spawn` starts engines and carriers. Raises RosterError when the memory of earlier rosters is not
        usable."""
        own_id, cluster = state.peer.id, state.peer.cluster
        self.store = TlsStore(state.tls)
        self._addresses: Callable[[], tuple[str, ...]] = tuple
        self._removed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._run_folder = settings.state_dir / "run"
        self._background = Background()
        self._rosters = RosterKeeper(settings.state_dir, state)
        self._coordinators = Coordinators(
            state.coordinator,
            self.store,
            lambda: self._rosters.coordinators,
            partial(look_for_coordinator, state.root_sha256),
        )
        self._certificates = CertificateKeeper(
            settings.state_dir, state, self.store, signer, self._coordinators, self._rosters.follow_root
        )
        self._client = ClientKeeper(settings.state_dir / CLIENT_FOLDER, state, signer, self._coordinators)
        self.handshakes = Handshakes(cluster, signer, self.store, revoked=self._rosters.revoked)

        fetched = settings.state_dir / "models"
        linked = settings.state_dir / LINKED
        folders = (*settings.models, linked, fetched)
        on_cpu = settings.compute_on_cpu
        meter = MemoryMeter(settings.memory_limit, "CPU" if on_cpu else "")
        asker = ModelAsker(cluster, own_id, self.store, lambda: self._rosters.valid)
        allowed = settings.allow_downloads
        self._fetcher = Fetcher(folders, fetched, asker, linked=linked, allowed=allowed)
        tables = CostTables(settings.state_dir / "cost-tables")
        self._engines = EngineKeeper(folders, meter, self._fetcher, tables, on_cpu=on_cpu, spawn=spawn)
        self.models = ModelGiver(
            cluster, folders, settings.state_dir / "manifests", lambda: self._rosters.valid
        )
        root = settings.state_dir / FOLDER
        blocks = BlocksAsker(cluster, self.store, lambda: self._rosters.valid)
        self._disks = PrefixDisks(root, cluster, signer, settings.prefix_disk, blocks)
        self.blocks = BlocksGiver(cluster, root, signer, lambda: self._rosters.valid)
        around = Surroundings(
            own_id,
            settings.ring_host,
            settings.measure_links,
            settings.rdma_devices,
            self._run_folder,
            self._rosters,
            self.handshakes,
            self._engines,
            self._disks,
            self._report,
            lambda: self._session.stir(),
            spawn,
        )
        self.seats = Seats(own_id, lambda ring: Seat(ring, around), self._background)
        self._awake = Awake(self.seats.quiet)
        self.measuring = Measuring(
            cluster,
            self.store,
            settings.ring_host,
            lambda: self._rosters.valid,
            self.seats.quiet,
            everywhere=settings.measure_links,
        )
        self._models = ModelKeeper(self._fetcher, self._engines, self.seats, self._disks.forget)

        sealing_key = SealingKey(hybrid=settings.hybrid_sealing_key)
        self.unsealer = Unsealer(sealing_key, own_id, clock=self._rosters.now)
        self.receipt_key = ReceiptKey(cluster, own_id, signer, self._rosters.now)
        self.identity = Credentials(cluster, own_id, by_identity(signer), lambda: self._rosters.held)
        self.diagnosis = Diagnosis(
            settings, own_id, lambda: self._rosters.valid, lambda: self._session.connected
        )
        self._build_session(settings, state, signer, sealing_key, meter)

    def _build_session(
        self,
        settings: NodeSettings,
        state: MachineState,
        signer: Signer,
        sealing_key: SealingKey,
        meter: MemoryMeter,
    ) -> None:
        """The stream to the coordinator and what answers its messages, once all that they act on is there."""
        intake = RosterIntake(
            self._rosters,
            self._certificates.renew,
            self._send,
            self._remove,
            unsealer=self.unsealer,
            handshakes=self.handshakes,
            seats=self.seats,
            awake=self._awake,
        )
        self._watch = Watch(
            settings.state_dir,
            lambda: self._session.connected,
            self._rosters,
            intake,
            self.seats,
            self._awake,
        )
        prover = Prover(
            state.peer.cluster,
            signer,
            sealing_key.public_key,
            self._models.served,
            serial=settings.device_attestation is not None,
        )
        handler = CoordinatorHandler(
            self._send,
            self._remove,
            status=NodeStatus(
                prover,
                lambda: self._addresses(),
                rosters=self._rosters,
                seats=self.seats,
                meter=meter,
                engines=self._engines,
                fetcher=self._fetcher,
                measures=settings.measure_links,
            ),
            intake=intake,
            seats=self.seats,
            models=self._models,
            prover=prover,
            diagnosis=self.diagnosis,
            measuring=self.measuring,
            background=self._background,
        )
        introduction = Introduction(
            Purpose.SESSION,
            self.identity,
            self._coordinators.channel,
            lambda: self._rosters.root,
            self._certificates.renew,
        )
        self._session = CoordinatorSession(
            self._coordinators,
            introduction,
            handler,
            working=lambda: any(not seat.quiet for seat in self.seats),
        )

    async def run(self, addresses: Callable[[], tuple[str, ...]], stop: asyncio.Event) -> None:
        """Works until `stop` is set. `addresses` says at which addresses others reach this daemon now.

        Raises PermissionDenied (REMOVED) once the node is out of the roster.
        At its return no process and no file of a run remains, and the coordinator knows.
        """
        self._addresses = addresses
        shutil.rmtree(self._run_folder, ignore_errors=True)
        self._rosters.load()
        self._background.start(self._disks.run())
        loop = asyncio.get_running_loop()
        parts = (self._session, self._certificates, self._client, self._watch, self._models)
        work: list[asyncio.Future[Any]] = [loop.create_task(part.run()) for part in parts]
        work.append(self._removed)
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
            await self._coordinators.close()

    # Control service

    def gateway_key(self, cluster: str, identifier: str) -> bytes:
        return self._rosters.gateway_key(cluster, identifier)

    def authorities(self) -> tuple[bytes, ...]:
        return self._rosters.root.authorities

    def serving_epoch(self, ring: str, epoch: int) -> MemberEpoch:
        return self.seats.serving(ring, epoch)

    # Between the parts: the session is built last, since it needs their handler

    def _send(self, message: membership_pb2.MemberMessage) -> None:
        self._session.send(message)

    def _report(self, message: membership_pb2.MemberMessage) -> None:
        """Queues an epoch's message. Progress is dropped while the coordinator is away: it would be stale."""
        if self._session.connected or message.WhichOneof("message") != "progress":
            self._session.send(message)

    def _remove(self) -> None:
        """Ends `run`: this node is not enrolled any more."""
        if not self._removed.done():
            self._removed.set_exception(removed())

    async def _stop(self, reason: str) -> None:
        """Epochs end first, while the session can still report them; engines end after what uses them."""
        await self.seats.close(reason)
        await self._session.goodbye(reason)
        await self._background.stop()
        await self._fetcher.stop()
        await self.models.stop()
        await self._engines.stop()
        if reason == "removed":
            await self._disks.forget()
        await self._awake.follow(False)
        with contextlib.suppress(OSError):
            shutil.rmtree(self._run_folder, ignore_errors=True)
