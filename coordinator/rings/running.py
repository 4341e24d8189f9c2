"""Rings in service: their plans, epoch machines and step times, and the messages about them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from sealring.coordinator.planning.demand import DRAFTER, draft_context, draft_kv_bits
from sealring.coordinator.rings.epochs import Phase, RingEpochs
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.pace import Reached
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import EpochProgress, PrepareEpoch, RingState

READINGS = 12
"""Heartbeats with steps in one measurement: about a minute of work."""

SLOW = 2.0
"""A member is slow if its steps take this many times as long as before, compared with the other members'.

Policy: well above the effect of other programs and other kinds of prompts for a while."""


class StepTimes:
    """Finds the member of a ring that has become slow: throttled, swapping, or in a low power mode.

    Every member executes the same steps. The time of a member's steps, compared with the other members',
    depends neither on the load nor on the lengths of prompts. It changes when a machine does. The times are
    of one ring from its start: layers do not change in between.
    """

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._usual: dict[str, float] = {}
        self._shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=READINGS))

    def beaten(self, member: str, step_us: int, members: int) -> None:
        """Takes a member's step time in microseconds; 0 stands for too few steps."""
        changed = bool(step_us) and self._newest.get(member) != step_us
        self._newest[member] = step_us
        others = [took for other, took in self._newest.items() if other != member and took]
        if not changed or not others or len(others) < members - 1:
            return
        shares = self._shares[member]
        shares.append(step_us / median(others))
        if member not in self._usual and len(shares) == READINGS:
            self._usual[member] = median(shares)
            shares.clear()

    def slow(self, member: str) -> float:
        """How many times longer a member's steps take than before, against the others'; 0 below SLOW."""
        shares = self._shares.get(member, ())
        if len(shares) < READINGS:  # the first READINGS became the usual share
            return 0.0
        factor = median(shares) / self._usual[member]
        return factor if factor >= SLOW else 0.0


_PHASES = {
    Phase.WAITING: membership_pb2.RING_PHASE_DOWN,
    Phase.PREPARING: membership_pb2.RING_PHASE_FORMING,
    Phase.COMMITTING: membership_pb2.RING_PHASE_FORMING,
    Phase.SERVING: membership_pb2.RING_PHASE_SERVING,
}


@dataclass
class RunningRing:
    """A ring that the newest roster holds, of a `deployment` with every default filled in.

    While the ring is down, new requests are taken for `patience` seconds. `protocol` is that of its epoch.
    """

    plan: admin_pb2.RingPlan
    deployment: admin_pb2.DeploymentPlan
    machine: RingEpochs
    patience: int
    protocol: int = 0
    step_times: StepTimes = field(default_factory=StepTimes)
    drafts: tuple[int, int, int] = (0, 0, 0)
    """An epoch, the tokens drafted in it, and those of them that were accepted."""

    served: int = 0
    """The last epoch that served."""

    groupless: set[int] = field(default_factory=set)
    """The epochs after `served` whose group did not come up."""

    @property
    def spec(self) -> admin_pb2.DeploymentSpec:
        """What was asked for, with every default filled in."""
        return self.deployment.spec

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
            model_type=self.deployment.profile.model_type,
            share_prefixes=self.spec.share_prefixes,
            speculate=self.spec.speculate,
            protocol=self.protocol,
            patience=self.patience,
        )

    def beaten(self, member: str, health: membership_pb2.RingHealth, now: float, *, timed: bool) -> None:
        """Takes what a member's heartbeat says of this ring: whether a gateway drives it, the time of its
        steps if they were `timed`, and the head's counts of drafts."""
        if health.attended:
            self.machine.attended(health.epoch, now)
        self.step_times.beaten(member, health.step_us if timed else 0, len(self.plan.stages))
        head = next((stage.member for stage in self.plan.stages if not stage.rank), "")
        if member == head and health.accepted <= health.drafted:
            self.drafts = health.epoch, health.drafted, health.accepted

    def status(self) -> admin_pb2.RingStatus:
        """The status for operators."""
        machine = self.machine
        epoch, drafted, accepted = self.drafts
        forming = machine.progress
        return admin_pb2.RingStatus(
            ring=self.plan.ring,
            epoch=machine.epoch,
            phase=_PHASES[machine.phase],
            reason=machine.reason,
            links=machine.links,
            progress=[self._told(member, one, one.share) for member, one in forming.items()],
            slowest=self._told(*machine.slowest) if forming else None,
            drafted=drafted if epoch == machine.epoch else 0,
            accepted=accepted if epoch == machine.epoch else 0,
        )

    def _told(self, member: str, reached: Reached, share: float) -> EpochProgress:
        name, epoch = self.name_of(member), self.machine.epoch
        return EpochProgress(ring=self.plan.ring, epoch=epoch, member=name, fraction=share, **vars(reached))

    def prepare(
        self, stage: admin_pb2.StagePlan, epoch: int, roster_version: int, roster_hash: bytes, protocol: int
    ) -> PrepareEpoch:
        """The message of phase one for the member of a stage, under the given roster."""
        profile = self.deployment.profile
        return PrepareEpoch(
            ring=self.plan.ring,
            epoch=epoch,
            roster_version=roster_version,
            roster_hash=roster_hash,
            model=self.spec.model,
            model_digest=profile.digest,
            context=self.spec.context,
            max_rows=self.spec.max_rows,
            kv_budget=stage.kv_budget,
            prefill_chunk=self.spec.prefill_chunk,
            kv_bits=self.spec.kv_bits,
            speculate=self.spec.speculate,
            protocol=protocol,
            backend=self.backend,
            commit=profile.commit,
            hub_files=profile.hub_files,
            draft=draft_plan(self.deployment) if _holds(stage, "draft", DRAFTER) else None,
            taps=profile.draft.taps if _holds(self.plan.stages[-1], DRAFTER) else (),
            mtp=_holds(self.plan.stages[-1], "mtp"),
            vision=_holds(stage, "vision"),
            adapter=self.spec.adapter,
        )

    def name_of(self, member: str) -> str:
        """A member's name."""
        return self.stage_of(member).member_name

    def stage_of(self, member: str) -> admin_pb2.StagePlan:
        """A member's stage."""
        return next(stage for stage in self.plan.stages if stage.member == member)


def _holds(stage: admin_pb2.StagePlan, *residents: str) -> bool:
    return any(one.name in residents for one in stage.residents)


def draft_plan(plan: admin_pb2.DeploymentPlan) -> membership_pb2.DraftPlan:
    """The draft model of a deployment's heads, or the drafter of its tails, as these are to load it."""
    draft, spec = plan.profile.draft, plan.spec
    return membership_pb2.DraftPlan(
        model=spec.draft,
        digest=draft.digest,
        commit=draft.commit,
        hub_files=draft.hub_files,
        kv_bits=draft_kv_bits(plan.profile, spec.kv_bits),
        context=draft_context(plan.profile, spec.context),
    )


def reported_links(
    links: Sequence[membership_pb2.LinkInfo], running: RunningRing
) -> list[membership_pb2.LinkInfo]:
    """A member's report of its links, cut to two for each stage of the ring, without what is no address."""
    found = list(links[: 2 * len(running.plan.stages)])
    for link in found:
        if link.address and not is_address(link.address):
            link.address = ""
    return found


def is_address(text: str) -> bool:
    """Whether a member names an address in its report."""
    try:
        return parse_address(text)[1] > 0
    except InvalidInput:
        return False
