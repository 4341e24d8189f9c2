"""What befalls the disks of a simulated cluster: those of prefixes, and those of programs' state."""

# ruff: noqa: SLF001 - it is a part of the story

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulateddisk import PrefixDisk
from simulatedengine import SimulatedEngine

from sealring.mesh.ring import STORED_BLOCK

if TYPE_CHECKING:
    from stories import Asked, Story

OFTEN = 0.1
"""How often something befalls a disk, beside the other events of a story."""

SLOW_SECONDS = 3.0
"""A slow disk reads a file in this time, which is longer than it takes to compute what is in it."""

_WORDS = 1100
"""More than the least that is stored where caches cannot be cut."""

_ANSWERED_SECONDS = 90.0


class DiskStories:
    """The disks of one story. They have random numbers of their own."""

    def __init__(self, story: Story) -> None:
        self._story, self._random = story, random.Random(f"disks {story.seed}")

    def begin(self) -> None:
        """Gives the nodes disks of prefixes, or none."""
        if self._random.random() < 0.6:
            self._story.cluster.disks = {name: PrefixDisk() for name in self._story.nodes}

    async def event(self) -> None:
        """Something befalls a disk, or nothing does."""
        if self._random.random() < OFTEN and self._story.cluster.disks:
            self._random.choice((self._hinder, self._harm))()

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
