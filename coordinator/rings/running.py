"""One ring that the roster holds, with its epoch machine, and the messages that tell of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sealring.coordinator.rings.epochs import Phase, RingEpochs
from sealring.coordinator.rings.pace import Pace
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
    """`spec`, `digest` (hex) and `model_type` are the deployment's, with every default filled in.
    New requests are taken for `patience` seconds while it is down; `protocol` is that of its epoch."""

    plan: admin_pb2.RingPlan
    spec: admin_pb2.DeploymentSpec
    digest: str
    model_type: str
    machine: RingEpochs
    patience: int
    protocol: int = 0
    commit: str = ""
    """Of the hub, from which members fetch what no member has."""

    hub_files: str = ""

    pace: Pace = field(default_factory=Pace)
    drafts: tuple[int, int, int] = (0, 0, 0)
    """An epoch, tokens that the head guessed in it, and of them those that were right."""

    served: int = 0
    """The last epoch that served."""

    groupless: set[int] = field(default_factory=set)
    """The epochs since then whose group did not come up."""

    @property
    def backend(self) -> str:
        """Of the group in which its members compute together; none in a pipeline."""
        return "" if self.plan.pipeline else self.spec.backend

    def state(self) -> RingState:
        """As gateways see it."""
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
        """As gateways see it when it is out of service until its members have changed."""
        state = self.state()
        state.phase, state.reason = membership_pb2.RING_PHASE_DOWN, reason
        return state

    def beaten(self, member: str, health: membership_pb2.RingHealth) -> None:
        """What the head says of its guesses."""
        head = next((stage.member for stage in self.plan.stages if not stage.rank), "")
        if member == head and health.accepted <= health.drafted:
            self.drafts = health.epoch, health.drafted, health.accepted

    def status(self) -> admin_pb2.RingStatus:
        """As operators see it."""
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
        """Phase one for the member of a stage, under the roster that is the newest."""
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
        """What people call a member of the ring."""
        return self.stage_of(member).member_name

    def stage_of(self, member: str) -> admin_pb2.StagePlan:
        """What a member of the ring holds of it."""
        return next(stage for stage in self.plan.stages if stage.member == member)
