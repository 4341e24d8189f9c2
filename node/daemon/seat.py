"""A seat: a member's part in one ring, with its epochs, its engine, and its ends of the links.

Seats of one node do not disturb each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sealring.mesh.errors import Conflict, SealringError
from sealring.mesh.roster.model import Roster
from sealring.mesh.system.addresses import free_port, listen_error
from sealring.mesh.system.files import unwritable
from sealring.mesh.system.pace import Reached
from sealring.node.daemon.carrier_process import CarrierProcess
from sealring.node.daemon.engine_process import DraftKey, EngineProcess, StageKey
from sealring.node.daemon.engines import EngineKeeper
from sealring.node.daemon.epoch import LinkSecrets, MemberEpoch, Phase
from sealring.node.daemon.link_setup import LinkSetup, listen_for_neighbour
from sealring.node.daemon.plan import EpochPlan, LinkPlan, rdma_devices
from sealring.node.daemon.prefix_disks import PrefixDisks
from sealring.node.daemon.rotation import KeyTaker, Rotation, StepGate
from sealring.node.daemon.supervisor import Child, Spawn
from sealring.node.link.exchange import Handshakes
from sealring.node.link.params import LinkParams
from sealring.node.wire.channel import ChannelEnds, create_channel
from sealring.v1 import engine_pb2, membership_pb2

_QUIET_SECONDS = 5.0
"""Policy: well above the time between two steps, also of the long chunks of a prompt."""

_CLOSE_SECONDS = 3.0
"""Time for an epoch to end in order before its weights are freed. Other seats cannot load meanwhile."""


class Rosters(Protocol):
    """The roster by which links are made."""

    @property
    def current(self) -> Roster: ...


@dataclass(frozen=True)
class Surroundings:
    """Parts of the daemon that all its seats share. Carriers listen at `ring_host`, and where `measure_links`
    at all other addresses of the machine too; `rdma_devices` are the owner's setting."""

    own_id: str
    ring_host: str
    measure_links: bool
    rdma_devices: Sequence[str]
    run_folder: Path
    rosters: Rosters
    handshakes: Handshakes
    engines: EngineKeeper
    disks: PrefixDisks
    report: Callable[[membership_pb2.MemberMessage], None]
    on_step: Callable[[], None]
    """Called with the first step after a rest."""
    spawn: Spawn = Child.spawn
    """Starts carriers."""


class Seat:
    """Makes the parts of its epochs (`Workshop` in `epoch.py`). Use it from one event loop."""

    def __init__(
        self, ring: str, around: Surroundings, make_epoch: Callable[..., MemberEpoch] = MemberEpoch
    ) -> None:
        self.ring = ring
        self._make_epoch = make_epoch
        self.epoch: MemberEpoch | None = None
        self._around = around
        self._engine = around.engines.seat()
        self._prepared = membership_pb2.PrepareEpoch()
        self._folders: dict[EpochPlan, Path] = {}
        self._listeners: dict[EpochPlan, tuple[socket.socket, str]] = {}
        self._setups: dict[EpochPlan, LinkSetup] = {}

    # Its epochs

    @property
    def quiet(self) -> bool:
        """Whether no epoch forms here, and none has had a step lately."""
        if self.epoch is None or self.epoch.phase is Phase.ENDED:
            return True
        return self.epoch.phase is Phase.UP and self.epoch.gate.rested(_QUIET_SECONDS)

    @property
    def phase(self) -> Phase:
        """Phase of the newest epoch."""
        return self.epoch.phase if self.epoch is not None else Phase.ENDED

    @property
    def work(self) -> str:
        """Words on how far it is with an epoch that it prepares, for example "demo-0: loading 1.0 of 2.0
        GiB", or that it waits for the other members; "" otherwise."""
        epoch = self.epoch
        if epoch and epoch.phase is Phase.PREPARED:
            return f"{self.ring}: waiting for the other members"
        return f"{self.ring}: {epoch.reached.words}" if epoch and epoch.phase is Phase.PREPARING else ""

    @property
    def stage(self) -> StageKey | None:
        """The stage that the engine has loaded, or loads."""
        return self._engine.stage

    def prepare(self, plan: EpochPlan, prepared: membership_pb2.PrepareEpoch) -> None:
        """Starts an epoch in place of the one before. Raises Conflict (STALE_EPOCH)."""
        if plan.epoch <= self._prepared.epoch:
            raise Conflict("the epoch is not newer than the last", reason="STALE_EPOCH")
        previous = self.epoch
        if previous is not None:
            previous.end("superseded")
        self.epoch, self._prepared = self._make_epoch(plan, self, after=previous), prepared
        self.epoch.gate.on_step = self._around.on_step
        self.epoch.prepare()

    def named(self, number: int) -> MemberEpoch | None:
        """The epoch of this number, if it is the newest."""
        return self.epoch if self.epoch is not None and self.epoch.plan.epoch == number else None

    def serving(self) -> membership_pb2.ServingEpoch | None:
        """The epoch for a coordinator that may have forgotten it; None unless it is up."""
        if self.epoch is None or self.epoch.phase is not Phase.UP:
            return None
        return membership_pb2.ServingEpoch(prepared=self._prepared, links=self.epoch.links)

    def health(self) -> membership_pb2.RingHealth | None:
        """The epoch's figures for heartbeats; None without an engine that serves it."""
        epoch = self.epoch
        if epoch is None or epoch.engine is None or epoch.phase is Phase.ENDED:
            return None
        figures = epoch.engine.figures
        return membership_pb2.RingHealth(
            ring=self.ring,
            epoch=epoch.plan.epoch,
            steps=figures.steps,
            engine_memory=figures.memory,
            step_us=figures.step_us,
            drafted=figures.drafted,
            accepted=figures.accepted,
            attended=epoch.gateway is not None and epoch.gateway.used,
        )

    async def vacate(self, epoch: MemberEpoch) -> None:
        """Frees the weights of an epoch that has ended, unless a newer epoch uses them by now.

        No seat loads weights until these are free. The rest of the epoch's end delays only the seat's next
        epoch.
        """
        await asyncio.shield(self._around.engines.ending(self._free(epoch)))
        await epoch.closed()
        if self.epoch is epoch:
            self.epoch = None

    async def _free(self, epoch: MemberEpoch) -> None:
        with contextlib.suppress(TimeoutError):  # a frozen engine never closes its epoch: `drop` kills it
            async with asyncio.timeout(_CLOSE_SECONDS):
                await epoch.closed()
        if self.epoch is epoch:
            await self._engine.drop()

    # Parts of an epoch

    async def engine(self, plan: EpochPlan, progress: Callable[[Reached], None]) -> EngineProcess:
        """The engine with the epoch's stage loaded."""
        some = plan.held if plan.size > 1 and not plan.backend else None
        path = await self._around.engines.for_stage(plan.model, some, plan.commit, plan.hub_files, progress)
        if plan.taps and plan.draft is not None:  # a drafter reads the embedding, which comes with a head
            where = plan.commit, plan.hub_files, progress
            path = await self._around.engines.for_stage(plan.model, (0, 1), *where)
        most = plan.prefill_chunk, plan.max_rows
        stage = StageKey(str(path), plan.model_digest, *plan.layers, plan.context, plan.kv_bits, *most)
        if plan.adapter:
            adapter = await self._around.engines.for_stage(plan.adapter, None, progress=progress)
            stage = dataclasses.replace(stage, adapter=str(adapter))
        if plan.prompts[1]:
            stage = dataclasses.replace(stage, prompt_lo=plan.prompts[0], prompt_hi=plan.prompts[1])
        if plan.mtp:
            stage = dataclasses.replace(stage, mtp=True)
        if plan.taps:
            stage = dataclasses.replace(stage, taps=plan.taps)
        if plan.vision:
            stage = dataclasses.replace(stage, vision=True)
        if plan.backend:
            stage = dataclasses.replace(stage, rank=plan.rank, ranks=plan.size)
        if (draft := plan.draft) is not None:
            whole = await self._around.engines.for_stage(
                draft.model, None, draft.commit, draft.hub_files, progress
            )
            stage = dataclasses.replace(
                stage, draft=DraftKey(str(whole), draft.digest, draft.kv_bits, draft.context)
            )
        return await self._engine.with_stage(stage, progress)

    async def prefix_disk(
        self, plan: EpochPlan, caches: Sequence[bytes], former: Sequence[membership_pb2.FormerRing]
    ) -> engine_pb2.PrefixDisk | None:
        """The folder in which the engine stores prefixes, with its keys."""
        return await self._around.disks.of(plan, caches, former)

    async def bring(
        self, plan: EpochPlan, disk: engine_pb2.PrefixDisk, asked: engine_pb2.BringBlocks
    ) -> None:
        """Stores what other members have of a recall's blocks."""
        await self._around.disks.bring(plan, disk, asked)

    def channel(self) -> ChannelEnds:
        """Shared memory between engine and carrier."""
        return create_channel()

    async def carrier(
        self, plan: EpochPlan, channel: tuple[int, ...], on_fault: Callable[[SealringError], None]
    ) -> CarrierProcess:
        """A carrier that awaits the previous member. Raises ConfigError (STATE_UNWRITABLE, CANNOT_LISTEN)."""
        run_folder = self._around.run_folder
        try:
            run_folder.mkdir(mode=0o700, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="carrier-", dir=run_folder))
        except OSError as error:
            raise unwritable(run_folder, error) from None
        self._folders[plan] = folder
        listener, _ = self.listener(plan)
        carrier = await CarrierProcess.start(
            channel, listener, folder=folder, on_fault=on_fault, spawn=self._around.spawn
        )
        listener.close()  # the carrier has a copy of it
        return carrier

    def listener(self, plan: EpochPlan) -> tuple[socket.socket, str]:
        """The socket that listens for the ring's previous member, and its addresses, separated by commas.

        Each epoch has a new port.

        Raises ConfigError (CANNOT_LISTEN).
        """
        if plan not in self._listeners:
            everywhere = self._around.measure_links
            self._listeners[plan] = listen_for_neighbour(self._around.ring_host, everywhere=everywhere)
        return self._listeners[plan]

    def group_address(self) -> str:
        """An address at which this rank can listen for its group. Raises ConfigError (CANNOT_LISTEN)."""
        host = self._around.ring_host
        try:
            return f"{host}:{free_port(host)}"
        except OSError:
            raise listen_error(f"{host}:0") from None

    def rdma_devices(self, plan: EpochPlan) -> list[str]:
        """The RDMA devices by rank, for jaccl. Raises EpochEnded (NO_GROUP)."""
        return rdma_devices(plan, self._around.rdma_devices)

    async def handshakes(self, plan: EpochPlan, again: Callable[[LinkSecrets], None]) -> LinkSecrets:
        """The keys of both links after their handshakes. Repeated handshakes are answered until `settled`."""
        _, addresses = self.listener(plan)
        self._setups[plan] = LinkSetup(self._around.handshakes, plan, addresses, again)
        return await self._setups[plan].establish()

    def settled(self, plan: EpochPlan) -> None:
        """Stops answering handshakes."""
        setup = self._setups.pop(plan, None)
        if setup is not None:
            setup.close()

    async def rotate(self, plan: EpochPlan, gate: StepGate, carrier: KeyTaker) -> None:
        """Renews the links' keys until it is cancelled."""

        def params(link: LinkPlan) -> LinkParams:
            now = link.params
            return LinkParams.from_roster(
                self._around.rosters.current, now.ring, now.epoch, now.from_rank, self._around.own_id
            )

        await Rotation(plan, self._around.handshakes, gate, carrier, params).run()

    def release(self, plan: EpochPlan) -> None:
        """Removes the epoch's files, and closes its listening socket."""
        self.settled(plan)
        if plan in self._listeners:
            self._listeners.pop(plan)[0].close()
        folder = self._folders.pop(plan, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def report(self, message: membership_pb2.MemberMessage) -> None:
        """Sends a message to the coordinator."""
        self._around.report(message)
