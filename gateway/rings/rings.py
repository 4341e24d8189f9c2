"""All rings that this gateway schedules: who serves, by the verified roster, and who gets a request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import structlog

from sealring.edge.inference.answer import Answer
from sealring.edge.metrics import Metrics, ModelLoad
from sealring.gateway.rings.control import MemberTarget
from sealring.gateway.rings.guests import Refused
from sealring.gateway.rings.ring import Ring, ServingEpoch, below_floor, ring_down
from sealring.gateway.scheduler.request import Request
from sealring.mesh.clock import Clock, PausableClock, awake_clock
from sealring.mesh.errors import NotFound, Unavailable
from sealring.mesh.member.proof import Credentials
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.ring.routing import choose, ranked
from sealring.mesh.roster import model as rosters
from sealring.mesh.roster.rules import links_in_clear
from sealring.mesh.rpc.protocol import speaks
from sealring.mesh.rpc.tls import PeerChannel, TlsStore
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import membership_pb2 as membership

log = structlog.get_logger()

MAX_RINGS = 4096
_MAX_PATIENCE_SECONDS = 600

SAMPLE = 16
"""Rings of a deployment that are compared for a request, drawn at random where there are more: the least busy
of a few drawn ones is nearly as good as the least busy of all, and costs the same however many there are."""


class Rings:
    """The roster says which rings there are, of whom, and how far they are trusted; the coordinator's watch
    says which of their epochs serve. Only what both agree on is attached to."""

    def __init__(
        self,
        identity: Credentials,
        store: TlsStore,
        *,
        queue_limit: int,
        metrics: Metrics,
        signed_roster: Callable[[], tuple[bytes, bytes]],
        awake: Clock = awake_clock,
    ) -> None:
        self._formable = PausableClock(awake)
        """Runs while the coordinator is heard: without it no ring can form."""
        self._identity = identity
        self._store = store
        self._queue_limit = queue_limit
        self._metrics = metrics
        self._signed = signed_roster
        self._roster: rosters.Roster | None = None
        self._states: dict[str, membership.RingState] = {}
        self._told: set[str] = set()  # of which the coordinator has spoken since it was last connected to
        self.complete = False  # it has spoken of all that there is
        self._rings: dict[str, Ring] = {}
        self._refused = Refused()
        self._of_model: dict[str, list[Ring]] = {}
        self._trust_of: dict[str, int] = {}
        self._in_clear: set[str] = set()
        self._ring_of: dict[str, Ring] = {}
        self._channels: dict[tuple[str, str], PeerChannel] = {}
        self._created: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        metrics.watch(self._loads)

    # What the coordinator says

    def use_roster(self, roster: rosters.Roster | None) -> None:
        """A new roster, or None once the last one has expired: then nothing is served any more.

        A ring that it does not hold is planned anew, unless the coordinator says that it is gone.
        """
        self._roster = roster
        rings = roster.rings if roster else ()
        self._in_clear = {ring.id for ring in rings if ring.clear_links}
        self._trust_of = {ring.id: 0 if ring.clear_links else ring.min_trust for ring in rings}
        names = set(self._trust_of)
        for name in set(self._rings) - names:
            if roster is not None and name in self._states:
                self._rings[name].leave()
            else:
                self._close(name)
        self._close_channels()
        for ring in roster.rings if roster else ():
            self._created.setdefault(ring.deployment, int(time.time()))
            self._follow(ring)

    def ring_state(self, state: membership.RingState) -> None:
        """What a ring is doing, as the coordinator sees it."""
        if state.ring not in self._states and len(self._states) >= MAX_RINGS:
            return
        self._states[state.ring] = state
        self._told.add(state.ring)
        for ring in self._roster.rings if self._roster else ():
            if ring.id == state.ring:
                self._follow(ring)

    def begin_watch(self) -> None:
        """All that there is is told anew; until then what was known goes on."""
        self._told.clear()
        self.complete = False
        self._formable.run()

    def end_watch(self) -> None:
        """The coordinator is not heard any more."""
        self._formable.pause()

    def all_told(self) -> None:
        """What stands in no roster, and was not told, is gone."""
        self.complete = True
        for name in {*self._states, *self._rings} - set(self._trust_of) - self._told:
            self.ring_gone(name)

    def ring_gone(self, name: str) -> None:
        self._states.pop(name, None)
        if name in self._rings:
            self._close(name)

    def tick(self) -> None:
        """Must be called about every second."""
        for ring in self._rings.values():
            ring.tick()

    async def close(self) -> None:
        """Says goodbye to every member and fails what is under way."""
        for name in list(self._rings):
            self._close(name)
        if self._closing:
            await asyncio.wait(self._closing)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _follow(self, ring: rosters.Ring) -> None:
        state = self._states.get(ring.id)
        mine = self._rings.get(ring.id)
        if mine is None:
            mine = Ring(
                ring.id,
                ring.deployment,
                identity=self._identity,
                queue_limit=self._queue_limit,
                metrics=self._metrics,
                on_lost=self._lost,
                refused=self._refused,
                formable=self._formable,
            )
            self._rings[ring.id] = mine
            self._of_model.setdefault(ring.deployment, []).append(mine)
        if state is not None and state.patience:
            mine.patience = min(state.patience, _MAX_PATIENCE_SECONDS)
        if state is None or state.phase != membership.RING_PHASE_SERVING:
            mine.leave()
        elif not speaks(state.protocol):
            log.error("ring_speaks_another_protocol", ring=ring.id, protocol=state.protocol)
            mine.leave()
        elif state.deployment != ring.deployment or not (state.max_rows and state.prefill_chunk):
            log.error("ring_state_contradicts_roster", ring=ring.id)
            mine.leave()
        else:
            mine.serve(self._serving(ring, state))

    def _serving(self, ring: rosters.Ring, state: membership.RingState) -> ServingEpoch:
        assert self._roster is not None
        targets = []
        for member in ring.members:
            listed = self._roster.member(member.id)
            channels = tuple(self._channel(member.id, address) for address in listed.addresses)
            targets.append(MemberTarget(member.id, listed.identity_key, channels))
        return ServingEpoch(
            ring=ring.id,
            epoch=state.epoch,
            deployment=ring.deployment,
            members=tuple(targets),
            max_rows=state.max_rows,
            prefill_chunk=state.prefill_chunk,
            share_prefixes=state.share_prefixes,
            speculate=state.speculate,
            clear_links=ring.clear_links,
            context=ring.context,
            min_trust=ring.min_trust,
            roster_version=self._roster.version,
        )

    def _channel(self, member: str, address: str) -> PeerChannel:
        """A channel on which only this member can answer: TLS demands the name of its certificate."""
        channel = self._channels.get((member, address))
        if channel is None:
            peer = PeerIdentity(self._identity.cluster, Role.MEMBER, member)
            channel = PeerChannel(address, self._store, peer.server_name)
            self._channels[member, address] = channel
        return channel

    def _close(self, name: str) -> None:
        ring = self._rings.pop(name)
        others = [other for other in self._of_model.pop(ring.deployment) if other is not ring]
        if others:
            self._of_model[ring.deployment] = others
        self._lost(ring)
        task = asyncio.get_running_loop().create_task(ring.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _close_channels(self) -> None:
        """To whoever is not a member any more: at once, and whatever goes over them."""
        members = {member.id for member in self._roster.members} if self._roster else set()
        for key in [key for key in self._channels if key[0] not in members]:
            task = asyncio.get_running_loop().create_task(self._channels.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # What clients ask

    def deployments(self) -> list[str]:
        """The names of the models that can be asked for."""
        return sorted({*self._of_model, *(state.deployment for state in self._states.values())})

    def models(self) -> list[inference.Model]:
        """One entry per deployment."""
        return [self._model(name) for name in self.deployments()]

    def signed_roster(self) -> inference.GetRosterResponse:
        """The roster as it was signed, with how busy its rings are. Raises FailedPrecondition."""
        roster, root_metadata = self._signed()
        response = inference.GetRosterResponse(roster=roster, root_metadata=root_metadata)
        for ring in self._rings.values():
            if ring.attached and ring.serving:
                load = ring.load()
                state = self._states.get(ring.name)
                response.serving.add(
                    ring=ring.name,
                    waiting=load.waiting,
                    running=load.running,
                    rows=ring.serving.max_rows,
                    model_type=state.model_type if state else "",
                    capabilities=ring.capabilities,
                )
        return response

    def submit(self, request: Request, answer: Answer) -> None:
        """Gives a request to the ring that it is sealed for, else to one that is trusted enough: the one that
        its key prefers if that is not too busy, without a key the least busy.

        Raises NotFound (MODEL_NOT_FOUND), FailedPrecondition (TRUST_BELOW_FLOOR), Unavailable (RING_DOWN,
        RING_GONE).
        """
        ring = self._route(request)
        if request.routing_key:
            self._metrics.routed.labels(request.deployment).inc()
        self._ring_of[request.id] = ring
        ring.submit(request, answer)

    def cancel(self, request_id: str) -> None:
        ring = self._ring_of.pop(request_id, None)
        if ring is not None:
            ring.cancel(request_id)

    def _route(self, request: Request) -> Ring:
        model, min_trust = request.deployment, request.min_trust
        rings = self._of_model.get(model)
        if not rings and model in self.deployments():
            raise ring_down(f"no ring can serve {model!r} at the moment")
        if not rings:
            raise NotFound(f"there is no model {model!r}", reason="MODEL_NOT_FOUND", param="model")
        if sealed_for := request.envelope.sealed_for.ring:
            rings = _sealed_route(rings, sealed_for)
        elif request.routing_key:
            ready = [ring for ring in rings if ring.attached and self._trust(ring) >= min_trust]
            if ready:
                return self._preferred(model, request, ready)
        drawn = [ring for ring in _draw(rings) if ring.attached and self._trust(ring) >= min_trust]
        return (
            min(drawn, key=_busy)
            if drawn
            else self._search(model, rings, min_trust, goes_on=request.progress.all_attempts > 0)
        )

    def _preferred(self, model: str, request: Request, rings: Sequence[Ring]) -> Ring:
        """The ring that keeps what the request's key has left, or the next that the key would prefer."""
        order = ranked(request.routing_key, rings, _name, SAMPLE)
        at = choose([_requests(ring) for ring in order])
        if at:
            self._metrics.routed_away.labels(model).inc()
        return order[at]

    def _search(self, model: str, rings: Sequence[Ring], min_trust: int, *, goes_on: bool) -> Ring:
        """The least busy of all that may have a request, or the error that tells why there is none. One that
        `goes_on` was accepted before its epoch ended, and waits for a ring however long that is down."""
        # Of a ring that is planned anew it is not known yet; what waits for it is checked when it serves.
        trusted = [ring for ring in rings if self._trust_of.get(ring.name, min_trust) >= min_trust]
        if not trusted:
            if all(ring.name in self._in_clear for ring in rings):
                raise links_in_clear(model)
            raise below_floor(min_trust, max(map(self._trust, rings)))
        ready = [ring for ring in trusted if ring.attached] or [
            ring for ring in trusted if ring.patient or goes_on
        ]
        if not ready:
            raise ring_down(f"no ring serves {model!r} at the moment")
        return min(ready, key=_busy)

    def _trust(self, ring: Ring) -> int:
        return self._trust_of.get(ring.name, 0)

    def _lost(self, lost: Ring) -> None:
        """Gives what waits for a ring that is down to others of the deployment that are trusted enough."""
        rings = self._of_model.get(lost.deployment, ())
        others = [ring for ring in rings if ring is not lost and ring.attached]
        if not others:
            return
        for request, answer in lost.take_waiting():
            if request.envelope.sealed_for.ring:
                answer.fail(_sealed_elsewhere("RING_DOWN"))
                continue
            trusted = [ring for ring in others if self._trust(ring) >= request.min_trust]
            if not trusted:
                ring = lost
            elif request.routing_key:
                ring = self._preferred(lost.deployment, request, trusted)
            else:
                ring = min(_draw(trusted), key=_busy)
            self._ring_of[request.id] = ring
            ring.submit(request, answer)

    def _model(self, name: str) -> inference.Model:
        rings = self._of_model.get(name, ())
        signed = [ring for ring in self._roster.rings if ring.deployment == name] if self._roster else []
        serving = [ring for ring in rings if ring.attached and ring.serving]
        return inference.Model(
            name=name,
            model_type=self._model_type(name),
            context=min((ring.context for ring in signed), default=0),
            min_trust=min((ring.min_trust for ring in signed), default=0),
            rings=len(serving),
            rows=sum(ring.serving.max_rows for ring in serving if ring.serving),
            created=self._created.get(name, 0),
            capabilities=next((ring.capabilities for ring in rings if ring.capabilities), ()),
        )

    def _model_type(self, name: str) -> str:
        """As the coordinator says; a ring that is on its way has one already."""
        states = (state for state in self._states.values() if state.deployment == name)
        return next((state.model_type for state in states if state.model_type), "")

    def _loads(self) -> dict[str, ModelLoad]:
        loads: dict[str, ModelLoad] = {}
        for ring in self._rings.values():
            load, (tokens, held) = ring.load(), ring.scheduler.kept()
            model = loads.setdefault(ring.deployment, ModelLoad())
            model.waiting += load.waiting
            model.running += load.running
            model.kv_usage = max(model.kv_usage, load.kv_usage)
            model.kept_tokens += tokens
            model.kept_bytes += held
        return loads


def _sealed_route(rings: Sequence[Ring], name: str) -> list[Ring]:
    """The one ring whose head can open a prompt; it is waited for only where there is no other to seal for.

    Raises Unavailable (RING_GONE, RING_DOWN): the client seals anew.
    """
    found = [ring for ring in rings if ring.name == name]
    if not found:
        raise _sealed_elsewhere("RING_GONE")
    if not found[0].attached and any(ring.attached for ring in rings):
        raise _sealed_elsewhere("RING_DOWN")
    return found


def _sealed_elsewhere(reason: str) -> Unavailable:
    return Unavailable(
        "the ring that the prompt was sealed for does not serve at the moment",
        hint="fetch the roster and seal again, for another ring",
        reason=reason,
    )


def _draw(rings: Sequence[Ring]) -> Sequence[Ring]:
    return rings if len(rings) <= SAMPLE else random.sample(rings, SAMPLE)


def _busy(ring: Ring) -> tuple[float, float]:
    """Requests per row that the ring could run, then memory: the less the better."""
    load = ring.load()
    return ((load.waiting + load.running) / _rows(ring), load.kv_usage)


def _requests(ring: Ring) -> tuple[int, int]:
    """Requests there, and rows that it could run."""
    load = ring.load()
    return load.waiting + load.running, _rows(ring)


def _rows(ring: Ring) -> int:
    return ring.serving.max_rows if ring.serving else 1


def _name(ring: Ring) -> str:
    return ring.name
