"""What happens to a simulated cluster, by a seed, and who judges it.

A story has machines, deployments and clients, and some forty events. Then all faults end, and what was asked
has to be answered. `Story.wrong` says what was not as it has to be; `Story.history` says what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from children import LoadFault
from diskstories import DiskStories
from keepalivestories import KeepAliveStories
from simulatedcluster import LARGE_MEMORY, TURN_SECONDS, Answer, Cluster
from simulatedhttp import APIS
from simulatedmodel import SimulatedModel
from socketstories import SocketStories
from virtualloop import VirtualLoop

from sealring.coordinator.rings.epochs import Phase as RingPhase
from sealring.coordinator.settings import MIN_CERTIFICATE_LIFETIME
from sealring.mesh.clock import BELIEVED_SECONDS
from sealring.mesh.errors import ModelError, SealringError

EVENTS = 40
ANSWERED_SECONDS = 900.0
"""After the last fault has ended, all that was asked is answered or refused within this virtual time."""

SETTLED_SECONDS = 300.0
"""Then rings serve again within this time, and new requests are answered."""

MOST_CONNECTIONS = 2.0
"""Attempts of one process to connect to one address, in a second: who tries more often does nothing else."""

NEVER = 1e6
"""How many times as long a load takes that does not end."""

MODEL = SimulatedModel()
MARKED = replace(MODEL, row_bytes=128 * MODEL.kv_bytes_per_token, mark_bytes=128 * MODEL.kv_bytes_per_token)
"""One that answers alike, whose caches cannot be cut."""

PUNCTUAL_SECONDS = 5.0
"""What was due is done within this time, where nothing stands still."""

PHASE_SECONDS = {RingPhase.PREPARING: 60.0, RingPhase.COMMITTING: 30.0}
"""For how long an epoch that does not come on is prepared or committed: half as long as usual."""

KNOWN_SECONDS = 30.0
"""After this time all gateways know that a ring is down."""

CORRUPT = ModelError("a file of the model cannot be read", reason="MODEL_CORRUPT")

TENANTS = ("ada", "bob")

SLOW = 150.0
"""How many times as long a step takes at rest, while an operator works."""

LATE = frozenset({"DEADLINE_EXCEEDED", "DEADLINE_PASSED", "HTTP_504"})

NOT_OURS = frozenset({"UNAVAILABLE", "CANCELLED", "PEER_UNREACHABLE"})
"""Reasons of a client whose gateway was ended: nobody else could tell it."""

WRONG_CLOCK = frozenset({"ENVELOPE_EXPIRED", "ROOT_NOT_YET_VALID", "ROSTER_NOT_YET_VALID"})
"""Reasons where a machine's clock was wrong when a program there was started, or for more than a minute."""

MANY_FAULTS = 3
"""A gateway gives up a request that ends epoch after epoch. As many faults that come together may have ended
them as well."""

REFUSED = frozenset(
    {
        *(
            "RING_DOWN",
            "NO_RING",
            "NO_ROSTER",
            "MODEL_NOT_FOUND",
            "QUEUE_FULL",
            "WAIT_TOO_LONG",
        ),
        *(
            "SHUTTING_DOWN",
            "DRAINING",
            "NOT_ENOUGH_NODES",
            "CLOCK_AHEAD",
            "ROSTER_EXPIRED",
            "MODEL_NOT_LOADED",
            "MODEL_LOADING",
            "NODES_SILENT",
        ),
        *("HTTP_200", "HTTP_404", "HTTP_422", "HTTP_429", "HTTP_503"),
    }
)
"""Reasons that a gateway may give while machines are missing; some APIs tell no more than a status."""


@dataclass
class Asked:
    """A request and how it ended."""

    number: int
    gateway: str
    deployment: str
    tenant: str
    content: str
    origin: int
    """The request whose text this text begins with; the request's own number if there is none."""
    api: str
    max_tokens: int
    choices: int
    deadline: float
    begun: float
    pieces: list[list[str]]
    """The pieces of each choice."""
    answer: Answer | None = None
    error: BaseException | None = None
    over: bool = False
    keep_alive: int | str | None = None
    """For how long it wants a model on demand to stay."""
    task: asyncio.Task[None] | None = None

    @functools.cached_property
    def text(self) -> str:
        """What the head reads."""
        return f"<user> {self.content}\n<assistant>" if self.is_chat else self.content

    @property
    def is_chat(self) -> bool:
        """Whether it is read as a chat's first message."""
        return self.api in APIS and APIS[self.api].chat

    @property
    def heard(self) -> int:
        """Pieces that have come."""
        return sum(map(len, self.pieces))

    def shares(self, other: Asked) -> bool:
        """Whether the other's caches may be used for this request."""
        same = (self.origin, self.tenant, self.deployment) == (other.origin, other.tenant, other.deployment)
        return same and "sealed" not in (self.api, other.api)


class Story:
    """One run of one seed."""

    def __init__(self, seed: int, folder: Path, loop: VirtualLoop, events: int = EVENTS) -> None:
        self.seed, self.events, self.loop = seed, events, loop
        self.random = random.Random(seed)
        self.model = self.random.choice((MODEL, MARKED))
        lifetime = self.random.choice((24 * 3600, 24 * 3600, MIN_CERTIFICATE_LIFETIME))
        self.cluster = Cluster(
            folder,
            seed,
            loop,
            [self.model],
            certificate_lifetime=lifetime,
            prepare_timeout=PHASE_SECONDS[RingPhase.PREPARING],
            commit_timeout=PHASE_SECONDS[RingPhase.COMMITTING],
        )
        self.history: list[str] = []
        self.wrong: list[str] = []
        self.asked: list[Asked] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._began = loop.time()
        self.nodes: list[str] = []
        self.gateways: list[str] = []
        self.deployments: dict[str, int] = {}
        self._away: set[str] = set()
        """Programs that do not run or stand still."""
        self._stalled = 0.0
        """When the last of the faults ends by which something stands still."""
        self._down: dict[str, tuple[float, Any]] = {}
        """The time from which on a deployment has not served, and `Cluster.down` of it."""
        self._drained: set[str] = set()
        self._late: dict[str, float] = {}
        """What was due at each ring when it was last looked at."""
        self._forming: dict[str, tuple[float, Any]] = {}
        self._shares: dict[str, tuple[object, float]] = {}
        """The time from which on a ring's epoch has not come on, and `Cluster.forming` of it."""
        self._wrong_clocks: set[str] = set()
        """Machines whose clock was wrong at some time."""
        self._away_gateways: set[str] = set()
        self._disks, self._wishes = DiskStories(self), KeepAliveStories(self)
        self._sockets = SocketStories(self)
        self._faults: list[float] = []
        """When they happened."""

    def note(self, what: str) -> None:
        """Adds a line to the history."""
        self.history.append(f"{self.loop.time() - self._began:9.3f}  {what}")

    # The story

    async def run(self) -> None:
        """Lives the story and judges it."""
        await self._begin()
        self._punctual()
        for _ in range(self.events):
            await asyncio.sleep(self._pause())
            await self._event()
            await self._disks.event()
        await self._end_faults()
        await self._judge()

    async def _begin(self) -> None:
        cluster, pick = self.cluster, self.random
        self.nodes = [f"node-{number}" for number in range(pick.choice((2, 3, 3, 4)))]
        stages = pick.randint(1, min(3, len(self.nodes)))
        small, crowded = pick.random() < 0.5, pick.random() < 0.15
        if crowded:  # each of two nodes has room for one model, and there are three
            self.nodes, stages, small = self.nodes[:2], 1, True
            cluster.memory = self.model.memory(1, tokens=5 * MODEL.context // 2)
        elif small:
            cluster.memory = self.model.memory(stages, tokens=pick.choice((3000, 6000)))
        self._disks.begin()
        cluster.rekey_records = pick.choice((1 << 30, 1 << 30, 50))
        await cluster.begin()
        self.gateways = [f"gateway-{number}" for number in range(pick.choice((1, 2)))]
        for number, name in enumerate((*self.nodes, *self.gateways)):
            await cluster.join(name, f"10.0.{2 if name in self.gateways else 1}.{number + 1}")
            for tenant in TENANTS if name in self.gateways else ():
                cluster.make_key(name, tenant)
            cluster.start(name)
        await asyncio.sleep(3)
        rows = 2 if crowded else 8 if small else 0
        await self._deploy("first", stages, speculate=pick.random() < 0.3, max_rows=rows)
        for name in ("second", "third") if crowded else ():
            await self._deploy(name, 1, on_demand=True, max_rows=2)
        if not small and pick.random() < 0.3:
            await self._deploy("second", 1, on_demand=pick.random() < 0.5)
        await cluster.serving("first")
        self.note(f"{len(self.nodes)} nodes, {len(self.gateways)} gateways; first serves")

    async def _deploy(self, name: str, stages: int, **spec: Any) -> None:
        await self.cluster.deploy(name, MODEL.name, stages=stages, **spec)
        self.deployments[name] = stages
        self.note(f"deployed {name} over {stages} {spec}")

    def _pause(self) -> float:
        if self.random.random() < 0.1:
            return self.random.uniform(5.0, 60.0)
        return self.random.expovariate(2.0)

    async def _event(self) -> None:
        events: list[tuple[int, Callable[[], Any]]] = [
            (24, self._ask),
            (2, self._kill_engine),
            (1, self._kill_carrier),
            (2, self._kill_node),
            (2, self._stand),
            (2, self._cut),
            (1, self._sleep),
            (1, self._step_clock),
            (1, self._restart_coordinator),
            (1, self._kill_gateway),
            (1, self._freeze_engine),
            (1, self._hinder_loads),
            (1, self._lag),
            (2, self._several),
            (3, self._lose_midway),
            (1, self._drain),
            (1, self._crowd),
            (1, self._late_reports),
        ]
        weights = [weight for weight, _ in events]
        ((_, happen),) = self.random.choices(events, weights)
        await happen()
        if happen not in (self._ask, self._crowd, self._several):
            self._faults.append(self.loop.time())

    # Events

    async def _several(self) -> None:
        """Faults come together."""
        faults = [self._kill_engine, self._cut, self._lag, self._kill_node, self._kill_carrier, self._stand]
        for fault in self.random.sample(faults, 3):
            await fault()
            self._faults.append(self.loop.time())
            await asyncio.sleep(self.random.expovariate(4.0))

    async def _ask(self) -> None:
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            self.ask_one()

    def ask_one(self, *, leaves: bool = True) -> Asked:
        """Asks something of a deployment, over a gateway. The client may go away before the answer's end."""
        pick = self.random
        words = pick.choice((2, 2, 5, 5, 20, 20, 100, 100, 300, 900))
        number = origin = len(self.asked)
        api = pick.choice((*2 * ("sealed", "sealed", "clear"), *APIS))
        text = " ".join([f"w{pick.randrange(1000)}" for _ in range(words)] + [f"r{number}"])
        earlier = [one for one in self.asked if len(one.text.split()) < MODEL.context // 4]
        if (
            earlier and pick.random() < 0.3
        ):  # another turn of a conversation, or a prompt like another tenant's
            before = pick.choice(earlier[-8:])
            again = before.content if before.is_chat else f"{before.text} {MODEL.answer(before.text)[0]}"
            origin, text = before.origin, f"{again} {text}"
            api = before.api if before.is_chat else api
        if pick.random() < 0.3:
            text += f" say:{pick.randint(1, 60)} x"
        choices, most = pick.choice((1, 1, 1, 1, 1, 3)), pick.choice((0, 0, 1, 8, 64))
        if api in APIS:
            choices = choices if APIS[api].choices else 1
            most = most or 64  # some of these APIs have a default, or none
        asked = Asked(
            number,
            pick.choice(self.gateways),
            pick.choice(list(self.deployments)),
            pick.choice(TENANTS),
            text,
            origin,
            api,
            most,
            choices,
            pick.choice((0.2, 2.0, 10.0)) if pick.random() < 0.2 else 0.0,
            self.loop.time(),
            [[] for _ in range(choices)],
        )
        if asked.deadline and api == "sealed":
            asked.api = "clear"
        self._wishes.wish(asked)
        self._begin_to_ask(asked)
        if leaves and pick.random() < 0.15:
            self.later(pick.choice((0.01, 0.1, 1.0)) * pick.random(), lambda: self._leave(asked))
        return asked

    def _begin_to_ask(self, asked: Asked) -> None:
        self.asked.append(asked)
        what = f"{len(asked.text.split())} words, {asked.choices} choices, {asked.api}, by {asked.tenant}"
        self.note(f"asks {asked.number}: {what}, {asked.deployment} over {asked.gateway}")
        asked.task = task = self.loop.create_task(self._ask_it(asked))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        if asked.deadline:
            self.later(asked.deadline + PUNCTUAL_SECONDS, lambda: self._deadline_passed(asked))

    def _ask_for(
        self,
        length: int,
        deployment: str,
        *,
        words: int = 0,
        gateway: str = "",
        api: str = "sealed",
        before: Asked | None = None,
        tenant: str = TENANTS[0],
        deadline: float = 0.0,
        content: str = "",
        keep_alive: int | str | None = None,
    ) -> Asked:
        """Asks for an answer of `length` tokens, or this, or goes on with a conversation. What is sealed is
        lost with its epoch, and takes all memory that the longest answer would."""
        number, gateway = len(self.asked), gateway or self.random.choice(self.gateways)
        origin, said = number, f"r{number} s{number**2} {words * 'w '}say:{length} x"
        if before is not None:
            origin, said = before.origin, f"{before.text} {MODEL.answer(before.text)[0]}{words * 'w '}"
        said = content or said
        most, now = 64 * (api != "sealed"), self.loop.time()
        asked = Asked(number, gateway, deployment, tenant, said, origin, api, most, 1, deadline, now, [[]])
        asked.keep_alive = keep_alive
        self._begin_to_ask(asked)
        return asked

    async def _beside_each_other(self) -> None:
        """A tenant has many prompts, and another tenant gets its turns: at memory, or at steps."""
        await (self._short_memory() if self.cluster.memory < LARGE_MEMORY else self._long_prompts())

    async def _short_memory(self) -> None:
        """A tenant has more prompts than memory holds, and another tenant two. Some have deadlines, which
        pass. Some conversations go on."""
        ask = functools.partial(self._ask_for, 3, "first", api="clear", gateway=self.gateways[0])
        asked = [ask(words=400) for _ in range(8)]
        await asyncio.sleep(0.5)
        late = [ask(words=400, deadline=2.0, tenant=one) for one in (*TENANTS, *TENANTS[:1])]
        await asyncio.sleep(0.5)
        asked += [ask(words=400) for _ in range(4)]
        others = [ask(words=400, tenant=TENANTS[1]) for _ in range(2)]
        await self._answers(SETTLED_SECONDS)
        self._has_turns(others, asked)
        if not any(one.error for one in late):
            self.wrong.append("no deadline passes")
        for before in self.random.sample(asked, 4):
            ask(words=40, before=before)
        await self._answers(SETTLED_SECONDS)

    async def _long_prompts(self) -> None:
        """A tenant's long prompts have their memory when one of another tenant comes."""
        self._slow_down(1.0)
        ask = functools.partial(self._ask_for, 3, "first", api="clear", gateway=self.gateways[0])
        asked = [ask(words=1500) for _ in range(6)]
        await self.cluster.until(lambda: any(one.text in self.cluster.wires.begun for one in asked))
        other = ask(words=1500, tenant=TENANTS[1])
        await self._answers(SETTLED_SECONDS)
        self._has_turns([other], asked)
        self._slow_down(SLOW)

    def _has_turns(self, some: list[Asked], many: list[Asked]) -> None:
        """The requests of one tenant are not begun behind the many of another one."""
        texts = {one.text for one in (*some, *many)}
        order = [text for text in self.cluster.wires.begun if text in texts]
        for one in some:
            if one.text in order[-3:]:
                self.wrong.append(f"request {one.number} waits for all requests of another tenant")

    def _slow_down(self, factor: float) -> None:
        for children in self.cluster.children.values():
            children.slowness = factor

    async def _crowd(self) -> None:
        """Long and short prompts have long answers at once."""
        deployment = self.random.choice(list(self.deployments))
        for words in self.random.sample((900, 2, 2, 2, 300, 2, 2), 7):
            self._ask_for(60, deployment, words=words)

    def _deadline_passed(self, asked: Asked) -> None:
        """A request that has not begun by its deadline fails then, also where nothing else happens. It has
        begun once its first chunk is announced, which slow machines may be longer in coming to."""
        begun = asked.text in self.cluster.wires.announced
        since, down = self._down.get(asked.deployment, (math.inf, None))
        long_down = down is not None and since < asked.begun - KNOWN_SECONDS
        long_down = long_down and down == self.cluster.down(asked.deployment)
        long_down = long_down and asked.gateway not in self._away_gateways
        if not (asked.over or begun or (self._stalled > asked.begun and not long_down)):
            self.wrong.append(f"request {asked.number} waits behind its deadline")

    def _leave(self, asked: Asked) -> None:
        """The client of a request goes away."""
        if not asked.over and asked.task is not None:
            self.note(f"the client of {asked.number} leaves after {asked.heard} pieces")
            asked.over = True
            asked.task.cancel()
            self._look_at(asked)

    async def _ask_it(self, asked: Asked) -> None:
        options: dict[str, Any] = {"choices": asked.choices}
        if asked.max_tokens:
            options["max_tokens"] = asked.max_tokens
        if asked.deadline:
            options["deadline_ms"] = round(1000 * asked.deadline)
        if asked.keep_alive is not None:
            options["keep_alive"] = asked.keep_alive
        try:
            asked.answer = await self.cluster.ask(
                asked.gateway,
                asked.deployment,
                asked.content,
                tenant=asked.tenant,
                api=asked.api,
                pieces=asked.pieces,
                **options,
            )
        except SealringError as error:
            asked.error = error
            self.note(f"asked {asked.number}: {error.reason} after {asked.heard} pieces")
        except Exception as error:
            asked.error = error
            self.note(f"asked {asked.number}: {error!r}")
        else:
            self.note(f"asked {asked.number}: answered")
        asked.over = True
        self._look_at(asked)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            do()

        task = self.loop.create_task(wait())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _one(self, names: list[str]) -> str | None:
        here = [name for name in names if name not in self._away]
        return self.random.choice(here) if here else None

    def _gone(self, name: str, seconds: float, back: Callable[[], None]) -> None:
        self._stall(seconds)
        self._away.add(name)

        def again() -> None:
            self._away.discard(name)
            back()

        self.later(seconds, again)

    async def _kill_engine(self) -> None:
        await self._to_child("engine", "killed", lambda child: child.crash())

    async def _kill_carrier(self) -> None:
        await self._to_child("carrier", "killed", lambda child: child.crash())

    async def _freeze_engine(self) -> None:
        self._stall(60.0)
        await self._to_child("engine", "frozen", lambda child: child.freeze())

    async def _lose_midway(self) -> None:
        """A part of a ring goes away in the middle of answers."""
        deployment = self.random.choice(list(self.deployments))
        apis = self.random.choices(("clear", "sealed", *APIS), k=3)
        asked = [self._ask_for(60, deployment, api=api) for api in apis]
        for _ in range(100):
            if any(one.heard > 5 or one.over for one in asked):
                break
            await asyncio.sleep(0.03)
        await self.random.choice((self._kill_engine, self._kill_carrier, self._kill_node, self._cut))()

    async def _hinder_loads(self) -> None:
        """A node loads slowly, without an end, or with an error, and has to load anew."""
        name = self._one(self.nodes)
        if name is None or self.cluster.children[name].load != LoadFault():
            return
        children, seconds = self.cluster.children[name], self.random.choice((10.0, 300.0))
        children.load = fault = self.random.choice(
            (LoadFault(20.0), LoadFault(NEVER), LoadFault(error=CORRUPT), LoadFault(killed=True))
        )
        self.note(f"loads of {name} are hindered for {seconds:g} s: {fault}")
        for child in children.named("engine"):
            child.crash()
        self._stall(seconds + 2 * SETTLED_SECONDS)

        def over() -> None:
            self.note(f"{name} loads again")
            children.load = LoadFault()
            for child in children.named("engine") if fault.factor > 1.0 else ():
                child.crash()

        self.later(seconds, over)

    async def _drain(self) -> None:
        """An operator drains a node for a while."""
        name, seconds = self.random.choice(self.nodes), self.random.choice((5.0, 120.0))
        if name in self._drained:
            return
        self._drained.add(name)

        def begin(undo: bool) -> None:
            task = self.loop.create_task(self._drain_it(name, undo))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        begin(False)
        self.later(seconds, lambda: begin(True))

    async def _drain_it(self, name: str, undo: bool) -> None:
        while True:
            try:
                await self.cluster.drain(name, undo=undo)
            except SealringError:
                if undo:
                    await asyncio.sleep(5.0)
                    continue
            else:
                self.note(f"the drain of {name} {'is undone' if undo else 'begins'}")
            break
        if undo:
            self._drained.discard(name)

    async def _late_reports(self) -> None:
        """A member's reports come late to the coordinator, while its ring begins epoch after epoch. For the
        second of them the member has to load anew, and does so slowly."""
        ring = [one for one in self.cluster.wires.served if one.open and one.size > 1]
        hosts = {self.cluster.machines[name].host: name for name in self.nodes}
        names = {hosts[one.host] for one in ring if one.ring == ring[0].ring}
        if len(names) < 2 or names & self._away or "coordinator" in self._away:
            return
        late, other = self.random.sample(sorted(names), 2)
        machines, children = self.cluster.machines, self.cluster.children
        if children[late].load != LoadFault():
            return
        self.cluster.network.lag(4.0, machines[late].host, machines["coordinator"].host)
        self.note(f"what {late} reports is late; its ring ends twice")
        self._stall(2 * SETTLED_SECONDS)
        for child in children[other].named("engine"):
            child.crash()
        await asyncio.sleep(2.0)  # the first of these epochs is prepared, as the member says later
        children[late].load = LoadFault(20.0)
        for child in (*children[other].named("engine"), *children[late].named("engine")):
            child.crash()

        def over() -> None:
            self.cluster.network.lag(0.0)
            children[late].load = LoadFault()

        self.later(20.0, over)

    async def _lag(self) -> None:
        """The messages of one connection are late, while others are as fast as ever."""
        late, seconds = self.random.choice((0.1, 1.0, 4.0)), self.random.choice((2.0, 20.0))
        what = self.cluster.network.lag(late)
        if what is not None:
            self.note(f"{what} has messages that are {late:g} s late, for {seconds:g} s")
            self._stall(seconds + late)
            self.later(seconds, lambda: self.cluster.network.lag(0.0))

    def _stall(self, seconds: float) -> None:
        self._stalled = max(self._stalled, self.loop.time() + seconds + PUNCTUAL_SECONDS)

    async def _to_child(self, kind: str, what: str, do: Callable[[Any], None]) -> None:
        name = self._one(self.nodes)
        found = self.cluster.children[name].named(kind) if name is not None else []
        if found:
            self.note(f"{kind} of {name} is {what}")
            do(self.random.choice(found))

    async def _kill_node(self) -> None:
        name = self._one(self.nodes)
        if name is not None:
            seconds = self.random.choice((0.5, 3.0, 20.0))
            self.note(f"{name} is killed, back in {seconds:g} s")
            self.cluster.kill(name)
            self._gone(name, seconds, lambda: self._start(name))

    async def _kill_gateway(self) -> None:
        name = self._one(self.gateways)
        if name is not None:
            self.note(f"{name} is killed")
            self._away_gateways.add(name)
            self.cluster.kill(name)
            self._gone(name, self.random.uniform(0.5, 5.0), lambda: self._start(name))

    async def _restart_coordinator(self) -> None:
        if "coordinator" in self._away:
            return
        seconds = self.random.choice((0.5, 10.0, 60.0))
        self.note(f"the coordinator is killed, back in {seconds:g} s")
        self.cluster.kill_coordinator()
        self._gone("coordinator", seconds, lambda: self._start("coordinator"))

    def _start(self, name: str) -> None:
        self.note(f"{name} starts")
        self.cluster.start(name)

    async def _stand(self) -> None:
        name = self._one([*self.nodes, *self.gateways, "coordinator"])
        if name is not None:
            seconds = self.random.choice((0.3, 3.0, 12.0, 45.0))
            self.note(f"{name} stands still for {seconds:g} s")
            self._stop(name)
            self._gone(name, seconds, lambda: self._go_on(name, 0.0))

    async def _sleep(self) -> None:
        seconds = self.random.choice((5.0, 40.0, 300.0))
        everything = [*self.nodes, *self.gateways, "coordinator"]
        names = everything if self.random.random() < 0.5 else [self.random.choice(everything)]
        for name in names:
            if name not in self._away:
                self.note(f"{name} sleeps for {seconds:g} s")
                self._stop(name)
                self._gone(name, seconds, lambda name=name: self._go_on(name, seconds))

    def _stop(self, name: str) -> None:
        self.cluster.stand(name)
        if name in self.gateways:
            self._away_gateways.add(name)

    def _go_on(self, name: str, asleep: float) -> None:
        self.note(f"{name} goes on")
        self.cluster.go_on(name, asleep=asleep)

    async def _cut(self) -> None:
        machines = list(self.cluster.machines)
        one, other = self.random.sample(machines, 2)
        both = self.random.random() < 0.6
        seconds = self.random.choice((0.5, 5.0, 30.0))
        self.note(f"{one} and {other} are cut off for {seconds:g} s, {'both ways' if both else 'one way'}")
        hosts = self.cluster.machines[one].host, self.cluster.machines[other].host
        self.cluster.network.cut(*hosts, both=both)
        self._stall(seconds)

        def mend() -> None:
            self.note(f"the ways between {one} and {other} are there again")
            self.cluster.network.mend(*hosts)

        self.later(seconds, mend)

    async def _step_clock(self) -> None:
        machine = self.random.choice(list(self.cluster.machines.values()))
        wrong, seconds = self.random.choice((3600.0, -3600.0, 90.0)), self.random.choice((25.0, 100.0))
        if machine.wrong:
            return
        self._wrong_clocks.add(machine.name)
        self.note(f"the clock of {machine.name} is wrong by {wrong:g} s for {seconds:g} s")
        machine.wrong = wrong

        def right() -> None:
            self.note(f"the clock of {machine.name} is right")
            machine.wrong = 0.0

        self.later(seconds, right)
        # A program that was started meanwhile takes the right time for a step, and waits before it believes.
        self.later(seconds + BELIEVED_SECONDS + PUNCTUAL_SECONDS, lambda: None)

    # The end

    async def _end_faults(self) -> None:
        while self._ending:
            await asyncio.wait(list(self._ending))
        self.note("all faults have ended")
        if not self._wrong_clocks:
            self.wrong += self.cluster.ends
        await self._answers(ANSWERED_SECONDS)
        for asked in self.asked:
            if not asked.over:
                self.wrong.append(f"request {asked.number} has not ended")

    async def _answers(self, seconds: float) -> None:
        """Waits until all that was asked has ended, for this time at most."""
        if self._asking:
            await asyncio.wait(list(self._asking), timeout=seconds)

    async def _judge(self) -> None:
        name = "the coordinator"
        try:
            await self.cluster.reachable(SETTLED_SECONDS)
            for name in self.deployments:
                if not any(one.plan.spec.on_demand for one in await self.cluster.deployed(name)):
                    await self.cluster.serving(name, SETTLED_SECONDS)
            async with asyncio.timeout(SETTLED_SECONDS):
                for name in self.gateways:
                    await self._until_it_answers(name)
        except TimeoutError:
            why = [ring.reason for ring in await self.cluster.rings(name)] if name in self.deployments else []
            self.wrong.append(f"{name} does not serve: {why}")
            return
        self._stalled = 0.0
        last = [self.ask_one(leaves=False) for _ in range(3)]
        await self._answers(SETTLED_SECONDS)
        self._slow_down(SLOW)  # few steps are under way for long
        undisturbed = await self._at_rest()
        last += undisturbed
        await self._answers(SETTLED_SECONDS)
        for asked in last:
            if asked in undisturbed and self.cluster.wires.begun[asked.text] > 1:
                self.wrong.append(f"request {asked.number}, asked at rest, was begun anew")
            # One with a deadline, or with more answers than memory holds, may fail: `_look_at` has judged it.
            if asked.answer is None and not (asked.over and (asked.deadline or asked.choices > 1)):
                self.wrong.append(f"request {asked.number}, asked at rest: {asked.error!r}, {asked.over}")
        await asyncio.sleep(10)
        await self._nothing_is_held()
        self.wrong += self.cluster.wires.broken + self.cluster.between.wrong
        for served in self.cluster.wires.served:
            if served.open and served.rows:
                self.wrong.append(f"rows are left at rest: {served}")
        most = 20 + MOST_CONNECTIONS * (self.loop.time() - self._began)
        for (process, address), attempts in self.cluster.network.attempts.items():
            if attempts > most:
                self.wrong.append(f"{process.name} has called {address} {attempts} times")
        for fault in self.loop.faults:
            self.wrong.append(f"unhandled: {fault.get('message')} {fault.get('exception')!r}")

    def _punctual(self) -> None:
        """The coordinator does what is due: it ends a phase of an epoch that takes too long, gives up a
        member that does not come back, and begins the next epoch."""
        program = self.cluster.programs.get("coordinator")
        if self.cluster.coordinator is None or program is None or program.process.stands:
            self._late.clear()
            self._forming.clear()
        else:
            self._phases_end()
            self._shares_rise()
            late = self.cluster.overdue()
            for ring, due in late.items():
                if due == self._late.get(ring):
                    self.wrong.append(f"the coordinator has something to do for {ring} and does not")
            self._late = late
        for name in self.deployments:
            down = self.cluster.down(name)
            if down is None or self._down.get(name, (0.0, None))[1] != down:
                self._down[name] = self.loop.time(), down
        self.loop.call_later(PUNCTUAL_SECONDS, self._punctual)

    def _phases_end(self) -> None:
        now, forming = self.loop.time(), self.cluster.forming()
        earlier = self._forming
        self._forming = {
            ring: earlier[ring] if ring in earlier and earlier[ring][1] == state else (now, state)
            for ring, state in forming.items()
        }
        for ring, (since, (phase, _)) in self._forming.items():
            if now > since + PHASE_SECONDS[phase] + 2 * PUNCTUAL_SECONDS:
                self.wrong.append(f"{ring} is {phase.value} since {now - since:.0f} s")
                self._forming[ring] = math.inf, forming[ring]

    def _shares_rise(self) -> None:
        """The share of a load never falls, over all epochs until one serves."""
        for ring, (life, share) in self.cluster.shares().items():
            before = self._shares.get(ring, (life, 0.0))
            if before[0] == life and share < before[1]:
                self.wrong.append(f"{ring} is told to have loaded {before[1]:.2f}, and then {share:.2f}")
            self._shares[ring] = life, share

    async def _at_rest(self) -> list[Asked]:
        """An operator's work without a fault: no answer is lost by it. Returns the requests meanwhile."""
        await self._leaves_are_heard()
        await self._beside_each_other()
        await self._disks.at_rest()
        await self._wishes.at_rest()
        await self._sockets.at_rest()
        if "third" in self.deployments:
            return await self._by_turns()
        before = await self.cluster.members("first")
        asked, name = [self._ask_for(8, "first") for _ in range(2)], self.random.choice(sorted(before))
        await self._answers(SETTLED_SECONDS)
        self._kill_at_rest(name)
        await asyncio.sleep(3.0)
        self._start(name)
        await self._serves_over("first", lambda members: members == before)
        if len(before) < len(self.nodes):
            asked += [self._ask_for(8, "first") for _ in range(2)]
            await asyncio.sleep(2.0)  # the first of what would be lost has come
            await self._drain_it(name, undo=False)
            await self._serves_until_it_moves(name)
            await self._serves_over("first", lambda members: name not in members)
            await self._drain_it(name, undo=True)
            await self._answers(SETTLED_SECONDS)
        await self._nobody_signs()
        if self.random.random() < 0.5:
            await self._phase_is_late()
        await self._repeats_itself()
        await self._late_reports()
        await self._serves_over("first", bool)
        await self._stays_away()
        await self._joins_and_is_evicted()
        return asked

    async def _serves_until_it_moves(self, name: str) -> None:
        """The ring of a node that drains serves until there is a plan without the node."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLED_SECONDS):
                served = down = False  # its node may just be back
                while name in await self.cluster.members("first"):
                    if served and down:
                        self.wrong.append(f"first does not serve while {name} drains")
                        break
                    await asyncio.sleep(0.1)
                    down = bool(self.cluster.down("first"))  # it has no ring just before its plan changes
                    served = served or not down

    async def _nobody_signs(self) -> None:
        """Members compute an answer and sign nothing: its client hears of it, and does not wait for ever."""
        self._signs(False)
        asked = self._ask_for(8, "first")
        await self._answers(SETTLED_SECONDS)
        if not asked.over:
            self.wrong.append(f"request {asked.number} waits for a receipt for ever")
        self._signs(True)

    async def _phase_is_late(self) -> None:
        """Members say nothing of what they have done for an epoch: the coordinator does not wait for ever."""
        lost, phase = self.random.choice((("up", RingPhase.COMMITTING), ("prepared", RingPhase.PREPARING)))
        self.cluster.between.lost = {lost}
        name = self.random.choice(sorted(await self.cluster.members("first")))
        self.note(f"an engine of {name} is killed, and nobody says that the next epoch is {lost}")
        for child in self.cluster.children[name].named("engine"):
            child.crash()
        await asyncio.sleep(PHASE_SECONDS[phase] + 3 * PUNCTUAL_SECONDS)
        self.cluster.between.lost = set()
        await self._serves_over("first", bool)

    async def _repeats_itself(self) -> None:
        """The coordinator sends old epochs and an old roster again, and nobody acts on them."""
        ends = len(self.cluster.ends)
        if self.cluster.coordinator is not None:
            self.note("the coordinator repeats itself")
            self.cluster.between.repeat(self.cluster.coordinator, self.random)
        await asyncio.sleep(PUNCTUAL_SECONDS)
        self.wrong += self.cluster.ends[ends:]

    def _signs(self, signs: bool) -> None:
        for children in self.cluster.children.values():
            children.signs = signs

    async def _leaves_are_heard(self) -> None:
        """Nothing is computed for a client that has left, over whatever gateway it had asked."""
        asked = [self._ask_for(60, "first", gateway=gateway) for gateway in self.gateways]
        await asyncio.sleep(2.0)
        apis = self.random.choices(("sealed", *APIS), k=6)
        asked += [self._ask_for(60, "first", words=60, api=api) for api in apis]
        await asyncio.sleep(0.5)  # some of these prompts are under way, and some have not begun
        for one in asked:
            self._leave(one)
        left = self.loop.time()
        await asyncio.sleep(4 * PUNCTUAL_SECONDS)
        for one in asked:
            if self.cluster.wires.computed.get(one.text, 0.0) > left + 3 * PUNCTUAL_SECONDS:
                self.wrong.append(f"request {one.number} is computed, though its client has left")
        await self._nothing_is_held()

    async def _nothing_is_held(self) -> None:
        for name in self.gateways:
            self.wrong += [f"{name} at rest: {one}" for one in await self.cluster.held(name)]

    def _kill_at_rest(self, name: str) -> None:
        self.note(f"{name} is killed")
        self.cluster.kill(name)

    async def _stays_away(self) -> None:
        """A member stays away from the coordinator, and maybe from its neighbours, while the coordinator may
        be new: the ring does without it, or no longer serves until it comes back."""
        before = await self.cluster.members("first")
        name, cut = self.random.choice(sorted(before)), self.random.random() < 0.5
        if cut:
            self.cluster.between.lost = {"end"}
            self.note(f"{name} and the coordinator are cut off, and nobody hears that an epoch has ended")
            self.cluster.network.cut(
                self.cluster.machines[name].host, self.cluster.machines["coordinator"].host
            )
        else:
            self._kill_at_rest(name)
        if cut or self.random.random() < 0.5:
            self.note("the coordinator is killed")
            self.cluster.kill_coordinator()
            await asyncio.sleep(1.0)
            self._start("coordinator")
            await self.cluster.reachable(SETTLED_SECONDS)
        if len(before) < len(self.nodes):
            await self._serves_over("first", lambda members: name not in members)
        else:
            await asyncio.sleep(2 * KNOWN_SECONDS)
            if self.cluster.down("first") is None and name in await self.cluster.members("first"):
                self.wrong.append(f"the coordinator believes that first serves, of which {name} is away")
            asked = self._ask_for(3, "first", api="clear", deadline=PUNCTUAL_SECONDS)
            await asyncio.sleep(3 * PUNCTUAL_SECONDS)
            if asked.text in self.cluster.wires.begun and self.cluster.down("first") is not None:
                self.wrong.append(f"request {asked.number} is computed in an epoch that has ended")
        if cut:
            self.cluster.between.lost = set()
            self.cluster.network.mend()
        else:
            self._start(name)
        await self._serves_over("first", lambda members: bool(members))

    async def _joins_and_is_evicted(self) -> None:
        """A node joins, and a member of the ring is evicted: the ring moves, and the evicted node ends."""
        await self.cluster.join("node-9", "10.0.1.9")
        self._start("node-9")
        name = self.random.choice(sorted(await self.cluster.members("first")))
        program = self.cluster.programs[name]
        self.note(f"node-9 joins, {name} is evicted")
        await self.cluster.evict(name)
        await self._serves_over("first", lambda members: name not in members)
        if not program.task.done():
            self.wrong.append(f"{name} was evicted, and goes on")

    async def _serves_over(self, deployment: str, holds: Callable[[set[str]], bool]) -> None:
        members: set[str] = set()
        try:
            async with asyncio.timeout(SETTLED_SECONDS):
                while not holds(members := await self.cluster.members(deployment)):
                    await asyncio.sleep(5.0)
                await self.cluster.serving(deployment)
        except TimeoutError:
            self.wrong.append(f"{deployment} does not serve over the right members, but {members}")

    async def _by_turns(self) -> list[Asked]:
        """Two models on demand take turns in the room of one."""
        asked = [self._ask_for(8, "second")]

        async def go_on(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
            """The second model is asked for again and again, so that it always answers."""
            end = self.loop.time() + seconds
            while self.loop.time() < end and not until():
                asked.append(self._ask_for(8, "second"))
                await asyncio.sleep(4.0)

        await go_on(TURN_SECONDS + PUNCTUAL_SECONDS)
        other = self._ask_for(8, "third")
        await go_on(TURN_SECONDS + 2 * PUNCTUAL_SECONDS, lambda: other.over)
        if not other.over:
            self.wrong.append("third does not get its turn beside second")
        await self._answers(SETTLED_SECONDS)
        came = {one.ring: one.since for one in self.cluster.wires.served}
        if came["second-0"] < came["third-0"] + TURN_SECONDS:
            self.wrong.append("third is unloaded before its turn is over")
        await go_on(TURN_SECONDS)
        await self._cannot_be_loaded()
        leaves = self._ask_for(8, "third")
        await asyncio.sleep(1.0)
        self._leave(leaves)
        return [*asked, other, self._ask_for(8, "second")]

    async def _cannot_be_loaded(self) -> None:
        """A request for a model that no node can load fails, and does not wait."""
        for children in self.cluster.children.values():
            children.load = LoadFault(error=CORRUPT)
        asked = self._ask_for(8, "third", api="clear")  # the client library of a sealed one asks for loads
        await self._answers(SETTLED_SECONDS)
        if not asked.over:
            self.wrong.append(f"request {asked.number} waits for a model that cannot be loaded")
        for children in self.cluster.children.values():
            children.load = LoadFault()

    async def _until_it_answers(self, gateway: str) -> None:
        while True:
            try:
                await self.cluster.ask(gateway, "first", "say:1 x", tenant=TENANTS[0])
                return
            except SealringError as error:
                if error.reason not in REFUSED:
                    self.wrong.append(f"{gateway} at rest: {error!r}")
                    return
                await asyncio.sleep(1.0)

    def _look_at(self, asked: Asked) -> None:
        """A request's answer, or what came before its end, is what the model says."""
        told = [MODEL.answer(asked.text, choice, asked.max_tokens) for choice in range(asked.choices)]
        said = ["".join(pieces) for pieces in asked.pieces]
        # Without a limit of its own an answer ends where a ring has no more memory.
        may_be_cut = not asked.max_tokens and self.cluster.memory < LARGE_MEMORY
        for choice, (text, _) in enumerate(told):
            if asked.answer is None and not text.startswith(said[choice]):
                what = f"broke off at {said[choice]!r}, which does not begin {text!r}"
                self.wrong.append(f"request {asked.number} {what}")
            elif asked.answer is not None and choice in asked.answer.cut and may_be_cut:
                told[choice] = said[choice], len(said[choice].split())
                if not text.startswith(said[choice]):
                    self.wrong.append(f"request {asked.number} was cut to {said[choice]!r}, not of {text!r}")
            elif asked.answer is not None and not asked.answer.texts[choice] == said[choice] == text:
                self.wrong.append(f"request {asked.number} got {said[choice]!r} instead of {text!r}")
        if asked.answer is not None:
            others = [one for one in self.asked if one is not asked and asked.shares(one)]
            again = self.cluster.wires.begun[asked.text] > 1  # it may begin with what it kept itself
            if asked.answer.cached and not again and not others:
                self.wrong.append(f"request {asked.number} begins with a prefix of another tenant")
            tokens = sum(count for _, count in told)
            if (asked.answer.tokens, asked.answer.prompt_tokens) != (tokens, len(asked.text.split())):
                self.wrong.append(
                    f"request {asked.number} has a wrong usage: {asked.answer}, {tokens} tokens"
                )
        if asked.error is not None and not self._may_fail(asked, asked.error):
            self.wrong.append(f"request {asked.number} failed: {asked.error!r}")

    def _may_fail(self, asked: Asked, error: BaseException) -> bool:
        if not isinstance(error, SealringError):
            return False
        if error.reason in REFUSED or (asked.deadline and error.reason in LATE):
            return True
        if error.reason == "REQUEST_GIVEN_UP":
            return sum(at > asked.begun for at in self._faults) >= MANY_FAULTS
        if asked.choices > 1 and error.reason == "TOO_LARGE_FOR_RING":
            return self.cluster.memory < LARGE_MEMORY
        if error.reason in WRONG_CLOCK and self._wrong_clocks:
            return True
        if error.reason == "STATE_UNWRITABLE" and self._disks.was_full("coordinator"):
            return True
        children = self.cluster.children.values()
        if error.reason == "RECEIPT_MISSING" and not all(one.signs for one in children):
            return True
        return asked.gateway in self._away_gateways and error.reason in NOT_OURS
