"""One ring in service: its plan, its epoch machine, and the messages about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sealring.coordinator.rings.epochs import Phase, RingEpochs
from sealring.coordinator.rings.step_times import StepTimes
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import EpochProgress, PrepareEpoch, RingState

_PHASES = {
    Phase.WAITING: membership_pb2.RING_PHASE_DOWN,
    Phase.PREPARING: membership_pb2.RING_PHASE_FORMING,
    Phase.COMMITTING: membership_pb2.RING_PHASE_FORMING,
    Phase.SERVING: membership_pb2.RING_PHASE_SERVING,
}


@dataclass
class RunningRing:
    """A ring that the newest roster holds.

    `spec`, `digest` (hex) and `model_type` are the deployment's, with every default filled in. While the
    ring is down, new requests are taken for `patience` seconds. `protocol` is that of its epoch.
    """

    plan: admin_pb2.RingPlan
    spec: admin_pb2.DeploymentSpec
    digest: str
    model_type: str
    machine: RingEpochs
    patience: int
    protocol: int = 0
    commit: str = ""
    """The hub's commit, from which members fetch files that no member has."""

    hub_files: str = ""

    step_times: StepTimes = field(default_factory=StepTimes)
    drafts: tuple[int, int, int] = (0, 0, 0)
    """An epoch, the tokens drafted in it, and those of them that were accepted."""

    served: int = 0
    """The last epoch that served."""

    groupless: set[int] = field(default_factory=set)
    """The epochs after `served` whose group did not come up."""

    @property
    def backend(self) -> str:
        """The backend of a tensor ring's group; "" for a pipeline."""
        return "" if self.plan.pipeline else self.spec.backend

    def state(self) -> RingState:
        """The state for gateways."""
        return RingState(
            ring=self.plan.ring,
            epoch=self.machine.epoch,
            phase=_PHASES[self.machine.phase],
            deployment=self.spec.name,
            reason=self.machine.reason,
            max_rows=self.spec.max_rows,
            context=self.spec.context,
            prefill_chunk=self.spec.prefill_chunk,
            model_type=self.model_type,
            share_prefixes=self.spec.share_prefixes,
            speculate=self.spec.speculate,
            protocol=self.protocol,
            patience=self.patience,
        )

    def down(self, reason: str) -> RingState:
        """The state for gateways while the ring's members change."""
        state = self.state()
        state.phase, state.reason = membership_pb2.RING_PHASE_DOWN, reason
        return state

    def beaten(self, member: str, health: membership_pb2.RingHealth) -> None:
        """Takes the head's counts of drafts; those of other members are dropped."""
        head = next((stage.member for stage in self.plan.stages if not stage.rank), "")
        if member == head and health.accepted <= health.drafted:
            self.drafts = health.epoch, health.drafted, health.accepted

    def status(self) -> admin_pb2.RingStatus:
        """The status for operators."""
        machine = self.machine
        epoch, drafted, accepted = self.drafts
        return admin_pb2.RingStatus(
            ring=self.plan.ring,
            epoch=machine.epoch,
            phase=_PHASES[machine.phase],
            reason=machine.reason,
            links=machine.links,
            progress=[
                EpochProgress(ring=self.plan.ring, epoch=machine.epoch, what=what, fraction=fraction)
                for what, fraction in machine.progress.values()
            ],
            drafted=drafted if epoch == machine.epoch else 0,
            accepted=accepted if epoch == machine.epoch else 0,
        )

    def prepare(
        self, stage: admin_pb2.StagePlan, epoch: int, roster_version: int, roster_hash: bytes, protocol: int
    ) -> PrepareEpoch:
        """The message of phase one for the member of a stage, under the given roster."""
        return PrepareEpoch(
            ring=self.plan.ring,
            epoch=epoch,
            roster_version=roster_version,
            roster_hash=roster_hash,
            model=self.spec.model,
            model_digest=self.digest,
            context=self.spec.context,
            max_rows=self.spec.max_rows,
            kv_budget=stage.kv_budget,
            prefill_chunk=self.spec.prefill_chunk,
            kv_bits=self.spec.kv_bits,
            speculate=self.spec.speculate,
            protocol=protocol,
            backend=self.backend,
            commit=self.commit,
            hub_files=self.hub_files,
        )

    def name_of(self, member: str) -> str:
        """A member's name."""
        return self.stage_of(member).member_name

    def stage_of(self, member: str) -> admin_pb2.StagePlan:
        """A member's stage."""
        return next(stage for stage in self.plan.stages if stage.member == member)


def reported_links(
    links: Sequence[membership_pb2.LinkInfo], running: RunningRing
) -> list[membership_pb2.LinkInfo]:
    """A member's report of its links, cut to two for each stage of the ring."""
    return list(links[: 2 * len(running.plan.stages)])
