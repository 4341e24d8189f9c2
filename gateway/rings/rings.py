"""All rings that this gateway schedules, in step with the verified roster and the coordinator's states."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

import structlog

from sealring.edge.inference.answer import AnswerWriter
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.choice import RingChoice
from sealring.gateway.rings.epoch import ServingEpoch
from sealring.gateway.rings.members import Members
from sealring.gateway.rings.receipts import RecentRosters
from sealring.gateway.rings.ring import Ring, Shared
from sealring.gateway.rings.table import MAX_RINGS, RingTable
from sealring.gateway.scheduler.request import Request
from sealring.mesh.clock import BELIEVED_SECONDS, Clock, PausableClock, awake_clock, wall_clock
from sealring.mesh.errors import SealringError, Unavailable
from sealring.mesh.roster import model as rosters
from sealring.mesh.rpc.protocol import speaks
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import membership_pb2 as membership

log = structlog.get_logger()

_MAX_PATIENCE_SECONDS = 600


class Rings:
    """Attaches to an epoch where roster and coordinator agree on it.

    The roster says which rings exist, of which members, and their trust; the coordinator's states say which
    of their epochs serve. A `RingTable` holds both, `RingChoice` chooses a ring for a request.
    """

    def __init__(
        self,
        members: Members,
        *,
        queue_limit: int,
        idle_prefill: bool,
        metrics: Metrics,
        signed_roster: Callable[[], tuple[bytes, bytes]],
        here: Callable[[], Collection[str]] = tuple,
        awake: Clock = awake_clock,
        wall: Clock = wall_clock,
        make_ring: Callable[..., Ring] = Ring,
    ) -> None:
        self._formable = PausableClock(awake)
        """Runs while the coordinator is connected: without it no ring can form."""
        self._signed = signed_roster
        self._here = here
        self._make_ring = make_ring
        self._shared = Shared(members, metrics, queue_limit, idle_prefill, formable=self._formable)
        self._announced: set[str] = set()  # rings that the coordinator has named on this connection
        self._models_announced: set[str] = set()
        self.complete = asyncio.Event()  # it has named all rings
        self._table = RingTable(wall, awake)
        self._models = self._table.models_named
        self._choice = RingChoice(self._table, metrics)
        self._ring_of: dict[str, Ring] = {}  # by request
        self.rosters = RecentRosters()
        self.clock_ahead = 0
        """Seconds by which this machine's clock is ahead, where that alone has made the roster expire."""

        self._closing: set[asyncio.Task[None]] = set()
        metrics.watch(self._table.loads)

    def deployments(self) -> list[str]:
        """The names of the models that can be asked for."""
        return self._table.deployments()

    def models(self) -> list[inference.Model]:
        """One entry per deployment."""
        return self._table.models()

    def aliases(self) -> dict[str, str]:
        """Further names of models, each with the deployment's."""
        return self._models.aliases()

    def signed_roster(self) -> inference.GetRosterResponse:
        """The roster as it was signed, with the load of its rings. Raises FailedPrecondition."""
        roster, root_metadata = self._signed()
        serving = self._table.serving()
        return inference.GetRosterResponse(
            roster=roster, root_metadata=root_metadata, serving=serving, models=self.models()
        )

    def submit(self, request: Request, answer: AnswerWriter) -> None:
        """Gives a request to a ring of its deployment, where it may wait until its model is loaded.

        Raises as `RingChoice.ring_for` and `ModelStates.check`, and Unavailable (ROSTER_EXPIRED) for a new
        one while this machine's clock is wrong.
        """
        if not request.progress.all_attempts:
            self._check_clock()
        self._models.ask(request.deployment, request.keep_alive, request.tenant)
        self._models.check(request.deployment, request.patience)
        ring = self._choice.ring_for(request)
        if request.routing_key:
            self._shared.metrics.routed.labels(request.deployment).inc()
        self._give(ring, request, answer)

    def cancel(self, request_id: str) -> None:
        """Ends a request; an id that is not here is ignored."""
        ring = self._ring_of.pop(request_id, None)
        if ring is not None:
            ring.cancel(request_id)

    def use_roster(self, roster: rosters.Roster | None) -> None:
        """Takes a new roster; None once the last one has expired, after which nothing is served.

        A ring that the roster does not hold keeps its requests: it is being planned anew, or the roster will
        be renewed. It is closed only after the coordinator has named all rings, and not this one.
        """
        if roster is None and self._table.roster is None:
            return
        self._table.use_roster(roster)
        if roster is not None:
            with contextlib.suppress(SealringError):  # it has expired meanwhile
                self.rosters.remember(roster.hash, self._signed())
        signed = {ring.id for ring in self._table.signed()}
        for ring in self._table:
            if ring.name in signed:
                continue
            kept = ring.name in self._table.states or self._models.on_demand(ring.deployment)
            if roster is None or not self.complete.is_set() or kept:
                ring.leave()
            else:
                self._close(ring.name)
        self._shared.members.keep({member.id for member in roster.members} if roster else ())
        for entry in self._table.signed():
            self._follow(entry)

    def ring_state(self, state: membership.RingState) -> None:
        """Takes the coordinator's state of one ring."""
        if not self._table.use_state(state):
            return
        self._announced.add(state.ring)
        for ring in self._table.signed():
            if ring.id == state.ring:
                self._follow(ring)

    def begin_watch(self) -> None:
        """Begins a connection on which the coordinator names all rings again; until then, old states hold."""
        self._announced.clear()
        self._models_announced.clear()
        self.complete.clear()
        self._formable.run()

    def end_watch(self) -> None:
        """The connection to the coordinator has ended."""
        self._formable.pause()

    def all_told(self) -> None:
        """The coordinator has named all rings: a ring that it did not name and no roster holds is gone. While
        no roster is in use, the next one tells (`use_roster`)."""
        self.complete.set()
        signed = {ring.id for ring in self._table.signed()}
        for name in {*self._table.states, *(ring.name for ring in self._table)} - signed - self._announced:
            if self._table.roster is None:
                self._table.states.pop(name, None)
            else:
                self.ring_gone(name)
        for model in self._models:
            if model.deployment not in self._models_announced:
                self.model_gone(model.deployment)

    def ring_gone(self, name: str) -> None:
        """A ring is no longer planned. If its model was unloaded, it keeps what waits for it."""
        self._table.states.pop(name, None)
        ring = self._table.get(name)
        if ring is None:
            return
        if self._models.on_demand(ring.deployment):
            ring.leave()
        else:
            self._close(name)

    def model_state(self, state: membership.ModelState) -> None:
        """Takes the coordinator's state of one model. One that could not be loaded fails what waits for
        it."""
        if not self._models.use(state):
            return
        name = state.deployment
        self._models_announced.add(name)
        if not self._models.on_demand(name):
            return
        for each in state.rings[:MAX_RINGS]:
            ring = self._table.get(each) or self._add(each, name)
            ring.hold(self._models.holding(name))
            ring.awaited()
            if (problem := self._models.problem(name)) is not None:
                for _, answer in ring.take_waiting():
                    answer.fail(problem)

    def model_gone(self, name: str) -> None:
        """A deployment was deleted, or is neither on demand nor has aliases."""
        self._models.remove(name)
        signed = {ring.id for ring in self._table.signed()}
        for ring in list(self._table.of(name)):
            if ring.name not in signed and ring.name not in self._table.states:
                self._close(ring.name)

    def loading(self, name: str) -> Unavailable | None:
        """The error for a request that could not wait until its model was loaded; None if it is loaded."""
        return self._models.loading_error(name) if self._models.absent(name) else None

    async def load(self, name: str, keep_alive: int | None, tenant: str) -> None:
        """Loads a model on demand and waits until a ring of it serves; with `keep_alive` 0 unloads it, once
        no other tenant wants it.

        Raises what keeps it from being loaded.
        """
        self._check_clock()
        self._models.ask(name, keep_alive, tenant)
        if keep_alive != 0 and self._models.on_demand(name):
            await self._models.loaded(name, lambda: any(ring.attached for ring in self._table.of(name)))

    def _check_clock(self) -> None:
        if self.clock_ahead:
            raise Unavailable(
                f"this gateway's clock is {self.clock_ahead} s ahead of its cluster's, so its roster is over",
                hint="ask another gateway; its operator sets the machine's clock",
                reason="ROSTER_EXPIRED",
                retry_after=round(BELIEVED_SECONDS),
            )

    @property
    def wanted(self) -> asyncio.Event:
        """Set when the coordinator should hear at once what clients want of the models on demand."""
        return self._models.wanted

    def demand(self) -> membership.Demand | None:
        """The report on models on demand for the coordinator; None if there is no such model."""
        return self._models.demand(self._counts)

    @property
    def asked(self) -> bool:
        """Whether a client waits for an answer."""
        return any(ring.answers for ring in self._table)

    def _counts(self, name: str) -> tuple[int, int]:
        counts = [ring.counts() for ring in self._table.of(name)]
        return sum(begun for begun, _ in counts), sum(waiting for _, waiting in counts)

    def tick(self) -> None:
        """Must be called about every second."""
        for ring in self._table:
            if self._models.absent(ring.deployment):
                ring.awaited()
            ring.tick()
        self._models.look()

    async def close(self) -> None:
        """Says goodbye to every member and fails the requests of every ring."""
        for ring in self._table:
            self._close(ring.name)
        if self._closing:
            await asyncio.wait(self._closing)
        await self._shared.members.close()

    def _follow(self, ring: rosters.Ring) -> None:
        """Attaches the ring to the epoch that serves, or makes it leave."""
        state = self._table.states.get(ring.id)
        mine = self._table.get(ring.id) or self._add(ring.id, ring.deployment)
        if state is not None and state.patience:
            mine.patience.seconds = min(state.patience, _MAX_PATIENCE_SECONDS)
        if state is None or state.phase != membership.RING_PHASE_SERVING:
            mine.leave()
        elif not speaks(state.protocol):
            log.error("ring_speaks_another_protocol", ring=ring.id, protocol=state.protocol)
            mine.leave()
        elif state.deployment != ring.deployment or not (state.max_rows and state.prefill_chunk):
            log.error("ring_state_contradicts_roster", ring=ring.id)
            mine.leave()
        else:
            assert self._table.roster is not None
            mine.serve(ServingEpoch.of(self._table.roster, ring, state, self._here()))

    def _add(self, name: str, deployment: str) -> Ring:
        made = self._make_ring(name, deployment, self._shared, self._hand_over)
        self._table.add(made)
        return made

    def _give(self, ring: Ring, request: Request, answer: AnswerWriter) -> None:
        self._ring_of[request.id] = ring
        ring.submit(request, answer)

    def _hand_over(self, lost: Ring) -> None:
        """Gives the requests that wait for a lost ring to the attached rings of its deployment."""
        if not self._choice.others(lost):
            return
        for request, answer in lost.take_waiting():
            try:
                ring = self._choice.instead_of(lost, request)
            except Unavailable as error:
                answer.fail(error)
                continue
            self._give(ring, request, answer)

    def _close(self, name: str) -> None:
        ring = self._table.remove(name)
        # before the ring closes: closing fails the requests that still wait for it
        self._hand_over(ring)
        task = asyncio.get_running_loop().create_task(ring.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
