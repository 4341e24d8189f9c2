"""What befalls the disks of a simulated cluster: those of prefixes, and those of programs' state."""

# ruff: noqa: SLF001 - it is a part of the story

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from fulldisks import FULL, TRIED
from simulateddisk import PrefixDisk
from simulatedengine import SimulatedEngine

from sealring.mesh.errors import SealringError
from sealring.mesh.ring import STORED_BLOCK
from sealring.v1.membership_pb2 import ROLE_NODE

if TYPE_CHECKING:
    from stories import Asked, Story

OFTEN = 0.1
"""How often something befalls a disk, beside the other events of a story."""

MOST_TRIES = 2.0
"""How often a program tries to write to a full disk, in a second."""

SLOW_SECONDS = 3.0
"""A slow disk reads a file in this time, which is longer than it takes to compute what is in it."""

_WORDS = 1100
"""More than the least that is stored where caches cannot be cut."""

_ANSWERED_SECONDS = 90.0


class DiskStories:
    """The disks of one story. They have random numbers of their own."""

    def __init__(self, story: Story) -> None:
        self._story, self._random = story, random.Random(f"disks {story.seed}")
        self._filled: set[str] = set()

    def was_full(self, name: str) -> bool:
        """Whether the disk of a machine with a program's state was full at some time."""
        return name in self._filled

    def begin(self) -> None:
        """Gives the nodes disks of prefixes, or none."""
        if self._random.random() < 0.6:
            self._story.cluster.disks = {name: PrefixDisk() for name in self._story.nodes}

    async def event(self) -> None:
        """Something befalls a disk, or nothing does."""
        if self._random.random() < OFTEN and self._story.cluster.disks:
            self._random.choice((self._hinder, self._harm))()
        if self._random.random() < OFTEN / 2:
            self._fill()

    def _hinder(self) -> None:
        """A disk of prefixes is slow, stands still or is full for a while."""
        seconds = self._random.choice((5.0, 60.0))
        name, disk = self._random.choice(list(self._story.cluster.disks.items()))
        what, begin = self._random.choice(
            (
                ("slow", lambda: setattr(disk, "seconds", SLOW_SECONDS)),
                ("standing still", lambda: setattr(disk, "stands", True)),
                ("full", lambda: setattr(disk, "full", True)),
            )
        )
        self._story.note(f"the prefix disk of {name} is {what} for {seconds:g} s")
        begin()
        self._story.later(seconds, lambda: self._right(name, disk))

    def _fill(self) -> None:
        """The disk with the state of a machine's program is full for a while."""
        machine = self._random.choice(list(self._story.cluster.machines.values()))
        seconds = self._random.choice((5.0, 60.0))
        if machine.host in FULL:
            return
        self._story.note(f"the disk of {machine.name} is full for {seconds:g} s")
        FULL.add(machine.host)
        self._filled.add(machine.name)
        before, begun = TRIED[machine.host], self._story.loop.time()
        self._story._stall(seconds)

        def over() -> None:
            self._story.note(f"the disk of {machine.name} has room")
            FULL.discard(machine.host)
            tried, seconds = TRIED[machine.host] - before, self._story.loop.time() - begun
            if tried > 10 + MOST_TRIES * seconds:
                self._story.wrong.append(f"{machine.name} tried {tried} times to write in {seconds:g} s")

        self._story.later(seconds, over)

    def _right(self, name: str, disk: PrefixDisk) -> None:
        self._story.note(f"the prefix disk of {name} is as ever")
        disk.seconds, disk.stands, disk.full = PrefixDisk.seconds, False, False

    def _harm(self) -> None:
        """A disk of prefixes loses files, or spoils them."""
        name, disk = self._random.choice(list(self._story.cluster.disks.items()))
        what: Callable[[], None] = self._random.choice((disk.lose, disk.damage))
        self._story.note(f"prefix disk of {name}: {what.__name__}")
        what()

    # At rest

    async def at_rest(self) -> None:
        """Disks do what they are to do, and nothing else befalls the cluster."""
        await self._prefixes()
        if self._random.random() < 0.3:
            await self._full_coordinator()

    async def _full_coordinator(self) -> None:
        """A coordinator refuses all that it cannot write, leaves nothing of it, and its cluster goes on."""
        story, cluster = self._story, self._story.cluster
        host, name = cluster.machines["coordinator"].host, self._random.choice(story.nodes)
        refused = [
            cluster.drain(name),
            cluster.evict(name),
            cluster.admin("DeleteDeployment", name="first"),
            cluster.admin("CreateJoinToken", role=ROLE_NODE),
        ]
        story.note("the coordinator's disk is full")
        before = await self._stored()
        FULL.add(host)
        for work in refused:
            try:
                await work
            except SealringError as error:
                if error.reason != "STATE_UNWRITABLE" or not error.hint:
                    story.wrong.append(f"a full disk is called {error!r}")
            else:
                story.wrong.append("a coordinator does what it cannot write down")
        if (after := await self._stored()) != before:
            story.wrong.append(f"of what was refused is left: {before} became {after}")
        asked = story._ask_for(3, "first")
        await self._answered(asked)
        if asked.answer is None:
            story.wrong.append(f"request {asked.number} fails beside a full coordinator: {asked.error!r}")
        FULL.discard(host)

    async def _stored(self) -> object:
        cluster = self._story.cluster
        deployments = (await cluster.admin("ListDeployments")).deployments
        nodes = (await cluster.admin("ListNodes")).nodes
        tokens = (await cluster.admin("ListJoinTokens")).tokens
        return (
            [one.plan.SerializeToString() for one in deployments],
            [(one.name, one.state) for one in nodes],
            len(tokens),
        )

    async def _prefixes(self) -> None:
        """A prompt that is on disk is read from there once no engine has it, or is computed while a disk
        stands still."""
        story, disks = self._story, self._story.cluster.disks
        if not disks:
            return
        first = self._asks()
        await self._answered(first)
        disk = disks[await self._loses_engine()]
        disk.stands = self._random.random() < 0.6
        again = self._asks(first)
        if disk.stands and self._random.random() < 0.5:
            await asyncio.sleep(0.5)
            story._leave(again)
        else:
            await self._answered(again)
        if not again.over:
            story.wrong.append(f"request {again.number} waits for a disk that stands still")
        elif not disk.stands and (again.answer is None or again.answer.cached < STORED_BLOCK):
            story.wrong.append(f"request {again.number} begins on disk, and is computed: {again.answer}")
        await asyncio.sleep(1.0)  # members have heard what is not wanted any more
        held = {name: self._recalled(name) for name in disks}
        if any(held.values()):
            story.wrong.append(f"members hold what was read for nobody: {held}")
        disk.stands = False

    def _asks(self, before: Asked | None = None) -> Asked:
        """Asks in a long conversation, which is worth storing."""
        story = self._story
        content = f"d{len(story.asked)} {_WORDS * 'w '}\n<assistant> ok\n<user> say:3 x"
        if before is not None:
            content = before.content
        return story._ask_for(
            3, "first", api="chat", before=before, content=content, gateway=story.gateways[0]
        )

    async def _answered(self, asked: Asked) -> None:
        if asked.task is not None:
            await asyncio.wait([asked.task], timeout=_ANSWERED_SECONDS)

    def _recalled(self, name: str) -> int:
        """Recalls of a node's engines that are under way, or of which no prefix is made."""
        programs = [child.program for child in self._story.cluster.children[name].named("engine")]
        disks = [one.disk for one in programs if isinstance(one, SimulatedEngine)]
        return sum(disk.recalled[1] for disk in disks if disk is not None)

    async def _loses_engine(self) -> str:
        """An engine of the first deployment is killed; the name of its node, once the ring is back."""
        cluster = self._story.cluster
        name = self._random.choice(sorted(await cluster.members("first")))
        self._story.note(f"an engine of {name} is killed")
        for child in cluster.children[name].named("engine"):
            child.crash()
        await asyncio.sleep(3.0)
        await self._story._serves_over("first", bool)
        return name
