"""A cluster that suffers faults, and what was seen of it: by its clients, and of what it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import hasty
import psutil
from answering import ASKED_SECONDS, Answer, Progress, ask_all, ask_clear
from capture import paths_in
from cases import Case
from following import follow
from namespaces import joined
from relay import led_through
from ringtest import LIMIT_SECONDS, MODEL, Ring, chat, started

from sealring.cli.local.cluster import LocalCluster
from sealring.client import AsyncClient
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.errors import SealringError
from sealring.v1 import admin_pb2, inference_pb2, membership_pb2

ENGINE, CARRIER = "sealring.node.engine.main", "sealring.node.carrier.main"
HELPER = "sealring.node.engine.text.template"
_HELPERS_PIPES = 2
"""At its engine."""
TEMPLATE = "sealring.node.engine.text.template"
MODULES = {"engine": ENGINE, "carrier": CARRIER, "template": TEMPLATE, "daemon": ""}
FEW = {"clear": ("greedy", "drawn", "long prompt"), "sealed": ("penalties",)}
EACH = {"clear": ("greedy", "drawn", "logprobs"), "sealed": ("long prompt", "penalties", "stops")}
"""One answer of each kind, in clear or sealed; one more comes over HTTP."""
SETTLE_SECONDS = 20.0
STANDBY = "10.77.0.7:7700"
_DISK_BYTES = 16 << 20
_CACHE_BYTES = 2 << 30
"""The size of a disk for prefixes, which take a tenth of it at most."""
PREFILL_CHUNK = 64
"""Tokens, so that a long prompt is on its way for several steps."""
_FAKETIME = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")
AFTER = {"prefill": 1}
"""By moment, the pieces of all answers after which the fault happens; DECODING at other moments."""
DECODING = 50


class Lacking(Exception):
    """This machine has not what the act needs."""


@dataclass
class Outcome:
    """What a case did. `pause`: seconds without a token, of the stream for which that was longest."""

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    again: int = 0
    """How often a client asked for an answer again."""
    full: int = 0
    """How often a client found the queue full."""
    pause: float = 0.0
    first: float = 0.0
    """Seconds from waking until any client received a piece, where machines slept."""
    back: float = 0.0
    """Seconds until the ring served, all of it being there."""
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacking: str = ""
    broken: str = ""
    """Why the cluster did not come back to what it was."""

    @property
    def lost(self) -> int:
        return self.errors.total()

    @property
    def good(self) -> bool:
        return not (self.lost or self.wrong or self.left or self.broken or self.lacking)

    def count(self, answer: Answer, expected: Answer) -> None:
        self.requests += 1
        self.again += answer.again
        self.full += answer.full
        if answer.error:
            self.errors[answer.error] += 1
            begins = all(expected.texts.get(n, "").startswith(text) for n, text in answer.texts.items())
            self.wrong += not begins
        else:
            self.wrong += answer != expected


class Place:
    """A ring on loopback, of which processes are killed and stopped."""

    kinds: Mapping[str, Sequence[str]] = {}
    """The answers that are asked for in clear and sealed, if not all."""

    on_demand = False
    """Its model is loaded by the first request."""

    def __init__(self, ring: Ring, client: AsyncClient, expected: dict[str, Answer]) -> None:
        self.ring, self.client, self.expected = ring, client, expected
        self.order: list[str] = []
        """The nodes of the ring, by rank."""
        self.woken: float | None = None
        """When the machines of a case woke that had slept, on the monotonic clock."""
        self._met = ring.cluster.processes["gateway"]

    @property
    def cluster(self) -> Any:
        return self.ring.cluster

    async def ready(self) -> Any:
        """The ring's status, once all of it is there and serves."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                with contextlib.suppress(SealringError):
                    if self.on_demand:
                        await self.ring.reply(chat("Hello!"), 1)
                    status = await self.ring.serving()
                    await self.learn()
                    if await self._online() == len(self.cluster.node_names):
                        return status
                await asyncio.sleep(0.1)

    async def meet(self) -> None:
        """Has its clients connected to a gateway that was started anew: that is not what a case leaves."""
        gateway = self.cluster.processes["gateway"]
        if gateway != self._met:
            await self.ask()
            self._met = gateway

    async def unload(self) -> None:
        """Has the model on demand unloaded."""
        request = inference_pb2.LoadModelRequest(model=self.ring.model, keep_alive=0)
        await self.ring.stub.LoadModel(request, metadata=self.ring.metadata())
        async with asyncio.timeout(LIMIT_SECONDS):
            while (await self.ring.status()).ring:
                await asyncio.sleep(0.05)

    async def _online(self) -> int:
        answer = await self.cluster.admin.call("ListNodes")
        return sum(one.state == admin_pb2.NODE_STATE_ONLINE for one in answer.nodes)

    async def learn(self) -> None:
        answer = await self.cluster.admin.call("ListDeployments")
        (plan,) = (one.plan for one in answer.deployments if one.plan.spec.name == self.ring.model)
        if plan.rings:
            self.order = [self.ring.node_of(stage.member) for stage in plan.rings[0].stages]

    async def spare(self) -> str:
        """The id of a node that is in no ring."""
        answer = await self.cluster.admin.call("ListNodes")
        return next(str(one.id) for one in answer.nodes if self.ring.node_of(one.id) not in self.order)

    def component(self, part: Sequence[str]) -> str | None:
        """The name of a part that is a component of the cluster."""
        kind, *rank = part
        if kind in ("engine", "carrier"):
            return None
        return self.order[int(rank[0])] if rank else kind

    async def process(self, part: Sequence[str], *, other_than: int = 0) -> psutil.Process:
        """The process of a part, as soon as there is one."""
        kind, *rank = part
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                with contextlib.suppress(IndexError, psutil.NoSuchProcess):
                    name = self.order[int(rank[0])] if rank else kind
                    found = self.ring.part(name, MODULES.get(kind, ""))
                    if found.pid != other_than:
                        return found
                await asyncio.sleep(0.005)

    async def start(self, name: str) -> None:
        await self.cluster.start_one(name)

    async def lasting(self, seconds: float) -> None:
        """Here no longer than until the ring is known to be down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (await self.ring.status()).phase == membership_pb2.RING_PHASE_SERVING:
                    await asyncio.sleep(0.1)

    async def prepare(self, case: Case) -> None:
        """What has to be as it is before the case begins."""

    async def ask(self, progress: Progress | None = None, *, again: bool = False) -> dict[str, Answer]:
        """The answers that are compared."""
        return await ask_all(self.ring, self.client, progress, again=again, **self.kinds)


@dataclass
class Things:
    """A cluster's share of this machine, by kind of process: another node may have another's place now."""

    processes: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[str] = field(default_factory=Counter)
    listening: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    """By path, without what is random in a name."""

    @classmethod
    def of(cls, cluster: LocalCluster) -> Things:
        made = cls()
        for name, pid in cluster.processes.items():
            component = "node" if name in cluster.node_names else name
            component = "coordinator" if name == "standby" else component
            for one in family(pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    made._add(one, component)
        for file in paths_in(cluster.state_dir):
            place = file.relative_to(cluster.state_dir)
            if place.parts[0] == "standby":
                place = Path("coordinator", *place.parts[1:])
            # `run` comes with a node's first carrier and stays, as prefixes and cost tables do
            stays = {"mlx", "prefixes", "cost-tables"}.intersection(place.parts)
            if place.parts[0] != "logs" and not stays and place.name != "run":
                made.files[re.sub(r"-[a-z0-9_]{8}\b|-\d\b", "-*", str(place))] += 1
        return made

    def _add(self, one: psutil.Process, component: str) -> None:
        """Counts a process of a component, unless it ends meanwhile."""
        words = " ".join(one.cmdline())
        if HELPER in words:  # a head has a few, each begun when a prompt finds the others busy
            self.descriptors["engine"] -= _HELPERS_PIPES
            return
        kind = next((kind for kind in ("engine", "carrier") if MODULES[kind] in words), component)
        descriptors, connections = one.num_fds(), one.net_connections()
        self.processes[kind] += 1
        self.descriptors[kind] += descriptors
        self.listening[kind] += sum(each.status == psutil.CONN_LISTEN for each in connections)

    def beyond(self, before: Things) -> list[str]:
        """What there is more than before. A descriptor or two may be a connection that is being replaced."""
        found = [f"process: {name}" for name in self.processes - before.processes]
        found += [f"port: {name}" for name in self.listening - before.listening]
        more = self.descriptors - before.descriptors
        found += [f"{count} descriptors: {name}" for name, count in more.items() if count > 2]
        return found + [f"file: {name}" for name in sorted(self.files - before.files)]


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none of one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(pid)
        return [own, *own.children(recursive=True)]
    return []


async def suffer(place: Place, case: Case) -> Outcome:
    """Has a case happen under load. The ring serves before; `broken` tells if it does not again."""
    from acts import ACTS

    outcome, asked = Outcome(), []
    hit, at = asyncio.Event(), [0.0]
    try:
        await place.prepare(case)
    except Lacking as error:
        outcome.lacking = str(error)
        return outcome
    await place.ready()
    await place.meet()
    await place.ring.idle()
    place.woken = None
    before = Things.of(place.cluster)
    if case.moment == "load":
        await place.unload()
        hit.set()

    async def happen() -> None:
        hit.set()

    async def act() -> None:
        await hit.wait()
        await MOMENTS.get(case.moment, _now)(place, case)
        at[0] = time.monotonic()
        acts = [each.split() for each in case.acts]
        said = await asyncio.gather(*(ACTS[kind](place, *words) for kind, *words in acts))
        outcome.notes += [each for each in said if each]

    async def probe(acting: asyncio.Task[None]) -> None:
        """Requests one after another while it lasts."""
        await hit.wait()
        while not acting.done():
            asked.append(Progress())
            answer = Answer()
            await ask_clear(place.ring, "greedy", answer, asked[-1], again=case.again)
            outcome.count(answer, place.expected["greedy"])
            await asyncio.sleep(0.2)

    asked.append(Progress(AFTER.get(case.moment, DECODING), happen))
    try:
        async with asyncio.timeout(4 * LIMIT_SECONDS), asyncio.TaskGroup() as group:
            acting = group.create_task(act())
            group.create_task(probe(acting))
            answers = await place.ask(asked[0], again=case.again)
            hit.set()
            for name, answer in answers.items():
                outcome.count(answer, place.expected[name])
        await undo(place, case)
        await place.ready()
        outcome.back = time.monotonic() - at[0]
        outcome.left = await _settled(place, before)
    except Lacking as error:
        outcome.lacking = str(error)
    except (SealringError, TimeoutError, ExceptionGroup, grpc.aio.AioRpcError) as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        outcome.lacking = "; ".join(str(one) for one in causes if isinstance(one, Lacking))
        outcome.broken = "; ".join(f"{type(one).__name__}: {one}" for one in causes)[:300]
    if place.woken is not None:
        pieces = (at for one in asked for times in one.times.values() for at in times if at > place.woken)
        outcome.first = min(pieces, default=place.woken) - place.woken
    outcome.pause = max((_pause(times, at[0]) for one in asked for times in one.times.values()), default=0.0)
    return outcome


def _pause(times: Sequence[float], at: float) -> float:
    """The longest wait for a next token from `at` on, of a stream that had begun before."""
    if not times or times[0] > at:
        return 0.0
    after = [at, *(one for one in times if one > at)]
    return max((b - a for a, b in pairwise(after)), default=0.0)


async def _settled(place: Place, before: Things) -> list[str]:
    """What is left once nothing of it goes any more."""
    await place.ring.idle()
    until = time.monotonic() + SETTLE_SECONDS
    while (left := Things.of(place.cluster).beyond(before)) and time.monotonic() < until:
        await asyncio.sleep(0.5)
    return left


async def _now(place: Place, case: Case) -> None:
    return


async def _starting(place: Place, case: Case) -> None:
    """Each part that is acted on is killed, and is just being started."""
    for each in case.acts:
        part = each.split()[1:]
        if (name := place.component(part[:2] if part[0] in MODULES else part[:1])) is not None:
            await place.cluster.children.kill_one(name)
            await place.start(name)
            await asyncio.sleep(0.3)
        else:
            old = await place.process(part[:2])
            old.kill()
            await place.process(part[:2], other_than=old.pid)


async def _handshake(place: Place, case: Case) -> None:
    (await place.process(("carrier", "2"))).kill()
    while (await place.ring.status()).phase != membership_pb2.RING_PHASE_FORMING:
        await asyncio.sleep(0.005)


async def _epoch(place: Place, case: Case) -> None:
    old = await place.process(("carrier", "0"))
    (await place.process(("carrier", "2"))).kill()
    await place.process(("carrier", "0"), other_than=old.pid)


async def _drain(place: Place, case: Case) -> None:
    node = (await place.cluster.admin.call("ListDeployments")).deployments[0].plan.rings[0].stages[1].member
    await place.cluster.admin.call("DrainNode", id=node)


async def undo(place: Place, case: Case) -> None:
    """A drained node is one as before again."""
    if case.moment != "drain":
        return
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(SealringError):
                nodes = (await place.cluster.admin.call("ListNodes")).nodes
                for one in nodes:
                    if one.state == admin_pb2.NODE_STATE_DRAINING:
                        await place.cluster.admin.call("DrainNode", id=one.id, undo=True)
                if all(one.state != admin_pb2.NODE_STATE_OFFLINE for one in nodes):  # that does not tell
                    return
            await asyncio.sleep(0.2)


async def _load(place: Place, case: Case) -> None:
    while (await place.ring.status()).phase != membership_pb2.RING_PHASE_FORMING:
        await asyncio.sleep(0.005)
    await place.learn()


MOMENTS = {"start": _starting, "handshake": _handshake, "epoch": _epoch, "drain": _drain, "load": _load}


class SeparateCluster(LocalCluster):
    """Four nodes and a coordinator in network namespaces of their own, each state folder on a disk.

    The gateway and its clients are in the caller's namespaces, which have to be private
    (`unshare --net --mount`).
    """

    def __init__(self, folder: Path, spaces: dict[str, str], **settings: dict[str, Any]) -> None:
        super().__init__(folder, MODEL, nodes=4, name="demo", settings=settings)
        self.spaces = spaces
        self.hosts = {name: f"10.77.0.{number}" for number, name in enumerate(spaces, 1)}
        self.clocks: dict[str, Path] = {}
        self.build = hasty.__file__
        self._disks: set[str] = set()

    def address(self, name: str) -> str:
        own = {"join": "coordinator"}.get(name, name)
        host = "127.0.0.1" if name.startswith("gateway") else self.hosts[own]
        return f"{host}:{self.ports[name]}"

    def settings_of(self, name: str) -> dict[str, Any]:
        ring = {"ring_host": self.hosts[name]} if name in self.node_names else {}
        return super().settings_of(name) | ring

    def _environment(self, name: str) -> dict[str, str]:
        if name not in self.clocks:
            return {}
        return {
            "LD_PRELOAD": str(faketime()),
            "FAKETIME_TIMESTAMP_FILE": str(self.clocks[name]),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }

    def entering(self, name: str) -> list[str]:
        space = self.spaces.get(name, "")
        return ["nsenter", f"--net=/run/netns/{space}"] if space else []

    async def start_one(self, name: str) -> None:
        if name not in self._disks:
            self._disks.add(name)
            await asyncio.to_thread(_own_disk, self.state_dir / name)
            if name in self.node_names:
                await asyncio.to_thread(_mounted, self.state_dir / name / "prefixes", _CACHE_BYTES)
        self.children.command = (*self.entering(name), sys.executable, self.build)
        await super().start_one(name)


def faketime() -> Path:
    found = next((one for pattern in _FAKETIME for one in Path("/").glob(pattern[1:])), None)
    if found is None:
        raise Lacking("no libfaketime")
    return found


def _own_disk(folder: Path) -> None:
    """A small disk for a state folder, with all that it had."""
    aside = folder.with_name(f".{folder.name}")
    folder.rename(aside)
    _mounted(folder, _DISK_BYTES)
    subprocess.run(["cp", "-a", f"{aside}/.", folder], check=True)
    subprocess.run(["rm", "-r", aside], check=True)


def _mounted(folder: Path, size: int) -> None:
    folder.mkdir(mode=0o700)
    options = f"size={size},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


class SeparatePlace(Place):
    """A ring of three of four machines, with networks, disks and clocks to break."""

    cluster: SeparateCluster
    few = True
    standby: CoordinatorSettings

    @property
    def addresses(self) -> dict[str, str]:
        return {name: self.cluster.address(name) for name in self.cluster.ports}

    def space(self, name: str) -> str:
        return self.cluster.spaces.get(name, "")

    def entering(self, name: str) -> list[str]:
        return self.cluster.entering(name)

    def within(self, space: str, *words: str) -> subprocess.CompletedProcess[str]:
        entering = ["nsenter", f"--net=/run/netns/{space}"] if space else []
        return subprocess.run([*entering, *words], capture_output=True, text=True, check=False)

    def disk(self, name: str) -> Path:
        return self.cluster.state_dir / name

    def relay(self, part: Sequence[str]) -> Any:
        name = str(self.component(part))
        number = list(self.cluster.spaces).index(name)
        return led_through(f"port{number}", self.cluster.spaces[name])

    async def lasting(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def command(self, name: str) -> list[str]:
        component = "node" if name in self.cluster.node_names else name
        words = [*self.cluster.config_of(name), component, "run"]
        return [*self.entering(name), sys.executable, hasty.__file__, *words]

    @contextmanager
    def twin(self, name: str) -> Iterator[list[str]]:
        """The command for a copy of a component, at another port of the same machine."""
        config, folder = Path(self.cluster.config_of(name)[1]), self.cluster.state_dir / "twin"
        other, address = config.with_name("twin.toml"), self.addresses[name]
        subprocess.run(["cp", "-a", self.disk(name), folder], check=True)
        said = config.read_text().replace(str(self.disk(name)), str(folder))
        host, _, port = address.rpartition(":")
        other.write_text(said.replace(address, f"{host}:{int(port) + 1000}"))
        command = self.command(name)
        command[command.index(str(config))] = str(other)
        try:
            yield command
        finally:
            other.unlink()
            subprocess.run(["rm", "-r", folder], check=True)

    def turn(self, name: str, seconds: int) -> None:
        self.cluster.clocks[name].write_text(f"{seconds:+d}\n")

    async def prepare(self, case: Case) -> None:
        if case.standby:
            self.cluster.children.command = (*self.entering("standby"), sys.executable, self.cluster.build)
            self.standby = await follow(self.cluster, STANDBY)
        for each in case.acts:
            kind, *part = each.split()
            if kind == "clock":
                await self.learn()
                name = str(self.component(part[:-2]))
                if name not in self.cluster.clocks:
                    faketime()
                    self.cluster.clocks[name] = self.cluster.state_dir.parent / f"clock-{name}"
                    self.turn(name, 0)
                    await self.cluster.children.kill_one(name)
                    await self.start(name)


@asynccontextmanager
async def separate_place(
    folder: Path, *, on_demand: bool = False, **settings: dict[str, Any]
) -> AsyncIterator[SeparatePlace]:
    """A new cluster that serves, and the answers that it gives undisturbed."""
    names = ("gateway", "coordinator", *(f"node-{number}" for number in range(4)), "standby")
    spaces = {name: "" if name == "gateway" else name for name in names}
    async with AsyncExitStack() as stack:
        stack.enter_context(joined(list(spaces.values())))
        stack.callback(_unmount, folder, names)
        cluster = await stack.enter_async_context(SeparateCluster(folder, spaces, **settings))
        spec = {"stages": 3, "prefill_chunk": PREFILL_CHUNK, "on_demand": on_demand}
        ring = await stack.enter_async_context(started(cluster, **spec))
        client = await stack.enter_async_context(ring.sealing(timeout=ASKED_SECONDS))
        place = SeparatePlace(ring, client, {})
        place.on_demand = on_demand
        await place.ready()
        place.expected = await place.ask()
        assert not any(answer.error for answer in place.expected.values())
        yield place


def _unmount(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["umount", "--lazy", folder / name], check=False, capture_output=True)
