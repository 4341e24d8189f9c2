"""What happens to a simulated cluster, by a seed, and who judges it.

A story has machines, deployments and clients, and some forty events. Then all faults end, and what was asked
has to be answered. `Story.wrong` says what was not as it has to be; `Story.history` says what happened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulatedcluster import Answer, Cluster
from simulatedmodel import SimulatedModel
from virtualloop import VirtualLoop

from sealring.mesh.errors import SealringError

EVENTS = 40
ANSWERED_SECONDS = 900.0
"""After the last fault has ended, all that was asked is answered or refused within this virtual time."""

SETTLED_SECONDS = 300.0
"""Then rings serve again within this time, and new requests are answered."""

MOST_CONNECTIONS = 2.0
"""Attempts of one process to connect to one address, in a second: who tries more often does nothing else."""

MODEL = SimulatedModel()

LATE = frozenset({"DEADLINE_EXCEEDED", "DEADLINE_PASSED"})

NOT_OURS = frozenset({"UNAVAILABLE", "CANCELLED", "PEER_UNREACHABLE"})
"""Reasons of a client whose gateway was ended: nobody else could tell it."""

WRONG_CLOCK = frozenset({"ENVELOPE_EXPIRED", "ROOT_NOT_YET_VALID", "ROSTER_NOT_YET_VALID"})
"""Reasons where a machine's clock was wrong when a program there was started, or for more than a minute."""

REFUSED = frozenset(
    {
        *(
            "RING_DOWN",
            "NO_RING",
            "NO_ROSTER",
            "MODEL_NOT_FOUND",
            "REQUEST_GIVEN_UP",
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
        ),
    }
)
"""Reasons that a gateway may give while machines are missing."""


@dataclass
class Asked:
    """A request and how it ended."""

    number: int
    gateway: str
    deployment: str
    text: str
    sealed: bool
    max_tokens: int
    deadline: float
    begun: float
    pieces: list[str] = field(default_factory=list)
    answer: Answer | None = None
    error: BaseException | None = None
    over: bool = False


class Story:
    """One run of one seed."""

    def __init__(self, seed: int, folder: Path, loop: VirtualLoop, events: int = EVENTS) -> None:
        self.seed, self.events, self.loop = seed, events, loop
        self.random = random.Random(seed)
        self.cluster = Cluster(folder, seed, loop, [MODEL])
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
        self._wrong_clocks: set[str] = set()
        """Machines whose clock was wrong at some time."""
        self._away_gateways: set[str] = set()

    def note(self, what: str) -> None:
        """Adds a line to the history."""
        self.history.append(f"{self.loop.time() - self._began:9.3f}  {what}")

    # The story

    async def run(self) -> None:
        """Lives the story and judges it."""
        await self._begin()
        for _ in range(self.events):
            await asyncio.sleep(self._pause())
            await self._event()
        await self._end_faults()
        await self._judge()

    async def _begin(self) -> None:
        cluster, pick = self.cluster, self.random
        await cluster.begin()
        self.nodes = [f"node-{number}" for number in range(pick.choice((2, 3, 3, 4)))]
        self.gateways = [f"gateway-{number}" for number in range(pick.choice((1, 1, 2)))]
        for number, name in enumerate((*self.nodes, *self.gateways)):
            await cluster.join(name, f"10.0.{2 if name in self.gateways else 1}.{number + 1}")
            cluster.start(name)
        await asyncio.sleep(3)
        stages = pick.randint(1, min(3, len(self.nodes)))
        await self._deploy("first", stages, speculate=pick.random() < 0.3)
        if pick.random() < 0.3:
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
        ]
        weights = [weight for weight, _ in events]
        ((_, happen),) = self.random.choices(events, weights)
        await happen()

    # Events

    async def _ask(self) -> None:
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            self.ask_one()

    def ask_one(self, *, leaves: bool = True) -> Asked:
        """Asks something of a deployment, over a gateway. The client may go away before the answer's end."""
        pick = self.random
        words = pick.choice((2, 5, 20, 100, 300))
        text = " ".join(f"w{pick.randrange(1000)}" for _ in range(words))
        if pick.random() < 0.3:
            text += f" say:{pick.randint(1, 120)} x"
        asked = Asked(
            len(self.asked),
            pick.choice(self.gateways),
            pick.choice(list(self.deployments)),
            text,
            pick.random() < 0.4,
            pick.choice((0, 0, 1, 8, 64)),
            pick.choice((0.2, 2.0, 10.0)) if pick.random() < 0.1 else 0.0,
            self.loop.time(),
        )
        if asked.deadline:
            asked.sealed = False
        self.asked.append(asked)
        kind = "sealed" if asked.sealed else "clear"
        self.note(f"asks {asked.number}: {words} words, {kind}, {asked.deployment} over {asked.gateway}")
        task = self.loop.create_task(self._ask_it(asked))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        if leaves and pick.random() < 0.1:
            self._later(pick.uniform(0.0, 1.0), lambda: self._leave(asked, task))
        return asked

    def _leave(self, asked: Asked, task: asyncio.Task[None]) -> None:
        """The client of a request goes away."""
        if not asked.over:
            self.note(f"the client of {asked.number} leaves after {len(asked.pieces)} pieces")
            asked.over = True
            task.cancel()
            self._look_at(asked)

    async def _ask_it(self, asked: Asked) -> None:
        options: dict[str, Any] = {"max_tokens": asked.max_tokens} if asked.max_tokens else {}
        if asked.deadline:
            options["deadline_ms"] = round(1000 * asked.deadline)
        try:
            asked.answer = await self.cluster.ask(
                asked.gateway,
                asked.deployment,
                asked.text,
                sealed=asked.sealed,
                pieces=asked.pieces,
                **options,
            )
        except SealringError as error:
            asked.error = error
            self.note(f"asked {asked.number}: {error.reason} after {len(asked.pieces)} pieces")
        except Exception as error:
            asked.error = error
            self.note(f"asked {asked.number}: {error!r}")
        else:
            self.note(f"asked {asked.number}: answered")
        asked.over = True
        self._look_at(asked)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
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
        self._away.add(name)

        def again() -> None:
            self._away.discard(name)
            back()

        self._later(seconds, again)

    async def _kill_engine(self) -> None:
        await self._to_child("engine", "killed", lambda child: child.crash())

    async def _kill_carrier(self) -> None:
        await self._to_child("carrier", "killed", lambda child: child.crash())

    async def _freeze_engine(self) -> None:
        await self._to_child("engine", "frozen", lambda child: child.freeze())

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
        self._later(seconds, self._mend)

    def _mend(self) -> None:
        self.note("all ways are there again")
        self.cluster.network.mend()

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

        self._later(seconds, right)

    # The end

    async def _end_faults(self) -> None:
        while self._ending:
            await asyncio.wait(list(self._ending))
        self.note("all faults have ended")
        if not self._wrong_clocks:
            self.wrong += self.cluster.ends
        if self._asking:
            await asyncio.wait(list(self._asking), timeout=ANSWERED_SECONDS)
        for asked in self.asked:
            if not asked.over:
                self.wrong.append(f"request {asked.number} has not ended")

    async def _judge(self) -> None:
        name = "the coordinator"
        try:
            await self.cluster.reachable(SETTLED_SECONDS)
            for name in self.deployments:
                if not any(one.plan.spec.on_demand for one in await self.cluster.deployed(name)):
                    await self.cluster.serving(name, SETTLED_SECONDS)
        except TimeoutError:
            self.wrong.append(f"{name} does not serve")
            return
        await asyncio.sleep(5)
        last = [self.ask_one(leaves=False) for _ in range(3)]
        await asyncio.wait(list(self._asking), timeout=SETTLED_SECONDS)
        for asked in last:
            if asked.answer is None:
                self.wrong.append(f"request {asked.number}, asked at rest: {asked.error!r}, {asked.over}")
        await asyncio.sleep(10)
        self.wrong += self.cluster.wires.broken
        for served in self.cluster.wires.served:
            if served.open and served.rows:
                self.wrong.append(f"rows are left at rest: {served}")
        most = 20 + MOST_CONNECTIONS * (self.loop.time() - self._began)
        for (process, address), attempts in self.cluster.network.attempts.items():
            if attempts > most:
                self.wrong.append(f"{process.name} has called {address} {attempts} times")
        for fault in self.loop.faults:
            self.wrong.append(f"unhandled: {fault.get('message')} {fault.get('exception')!r}")

    def _look_at(self, asked: Asked) -> None:
        """A request's answer, or what came before its end, is what the model says."""
        text, tokens = MODEL.answer(asked.text, 0, asked.max_tokens)
        said = "".join(asked.pieces)
        if asked.answer is not None:
            if asked.answer.text != text or said != text:
                self.wrong.append(f"request {asked.number} got {said!r} instead of {text!r}")
            if (asked.answer.tokens, asked.answer.prompt_tokens) != (tokens, len(asked.text.split())):
                self.wrong.append(
                    f"request {asked.number} has a wrong usage: {asked.answer}, {tokens} tokens"
                )
        elif not text.startswith(said):
            self.wrong.append(f"request {asked.number} broke off at {said!r}, which does not begin {text!r}")
        if asked.error is not None and not self._may_fail(asked, asked.error):
            self.wrong.append(f"request {asked.number} failed: {asked.error!r}")

    def _may_fail(self, asked: Asked, error: BaseException) -> bool:
        if not isinstance(error, SealringError):
            return False
        if error.reason in REFUSED or (asked.deadline and error.reason in LATE):
            return True
        if error.reason in WRONG_CLOCK and self._wrong_clocks:
            return True
        return asked.gateway in self._away_gateways and error.reason in NOT_OURS
