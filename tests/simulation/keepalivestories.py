"""Clients that say for how long a model on demand stays, in a simulated cluster, and who judges it."""

# ruff: noqa: SLF001 - it is a part of the story

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulatedcluster import LARGE_MEMORY, TURN_SECONDS
from simulatedhttp import APIS

from sealring.v1 import membership_pb2

if TYPE_CHECKING:
    from stories import Asked, Story

OFTEN = 0.4
NAME = "kept"
PUNCTUAL_SECONDS = 5.0
"""A model leaves within this time after its own is over."""

LATER = 2.0
"""A ring is known to serve within this time after its epoch was opened."""

NOT_LOADED, LOADED = membership_pb2.LOAD_PHASE_NOT_LOADED, membership_pb2.LOAD_PHASE_LOADED
STAYS = LOADED, membership_pb2.LOAD_PHASE_LOADING
"""A ring may answer before the coordinator has noted that its model is loaded."""


class KeepAliveStories:
    """The wishes of one story's clients. They have random numbers of their own."""

    def __init__(self, story: Story) -> None:
        self._story, self._random = story, random.Random(f"keep_alive {story.seed}")

    def wish(self, asked: Asked) -> None:
        """A client says for how long the model stays, or says nothing."""
        if asked.api != "sealed" and self._random.random() < 0.3:
            asked.keep_alive = self._random.choice((0, 3, 30, -1))

    async def at_rest(self) -> None:
        """A model on demand is there for as long as its clients say."""
        story, cluster = self._story, self._story.cluster
        if self._random.random() > OFTEN or cluster.memory < LARGE_MEMORY:
            return
        await cluster.deploy(NAME, story.model.name, stages=1, on_demand=True)
        scene = self._random.choice((self._leaves, self._answers, self._stays))
        story.note(f"{NAME} is deployed on demand: {scene.__name__}")
        await asyncio.sleep(1.0)  # gateways have heard of it
        await scene()
        await cluster.admin("DeleteDeployment", name=NAME)

    async def _leaves(self) -> None:
        """A model that nobody asks for leaves when its time is over, and not before."""
        seconds = self._random.choice((0, 5, 40))
        await self._answered(self._ask(3, self._random.choice((seconds, f"{seconds}s"))))
        end = self._story.loop.time()
        await self._until(lambda: self._phase() == NOT_LOADED, seconds + TURN_SECONDS + 4 * PUNCTUAL_SECONDS)
        self._left_at(max(end + seconds, self._since + TURN_SECONDS))

    async def _answers(self) -> None:
        """It does not leave while it answers, though its turn and its time are over."""
        asked = self._ask(60, 0)
        await self._until(lambda: asked.heard, 100.0)
        while not asked.over:
            if self._phase() not in STAYS:
                self._story.wrong.append(f"{NAME} leaves while request {asked.number} is answered")
                break
            await asyncio.sleep(0.5)
        await self._answered(asked)
        end = self._story.loop.time()
        if asked.answer is None or self._story.cluster.wires.begun[asked.text] > 1:
            self._story.wrong.append(f"request {asked.number} has not its answer at once: {asked.error!r}")
        await self._until(lambda: self._phase() == NOT_LOADED, TURN_SECONDS + 4 * PUNCTUAL_SECONDS)
        self._left_at(max(end, self._since + TURN_SECONDS))

    async def _stays(self) -> None:
        """It stays for one client though another wants it no more, until that client does not want it."""
        await self._answered(self._ask(3, -1, tenant="ada"))
        await self._answered(self._ask(3, 0, tenant="bob"))
        await asyncio.sleep(TURN_SECONDS + 2 * PUNCTUAL_SECONDS)
        if self._phase() != LOADED:
            self._story.wrong.append(f"{NAME} has left, though a client wants it for ever")
        await self._answered(self._ask(3, 0, tenant="ada"))
        end = self._story.loop.time()
        await self._until(lambda: self._phase() == NOT_LOADED, 4 * PUNCTUAL_SECONDS)
        self._left_at(end)

    def _ask(self, length: int, keep_alive: int | str, tenant: str = "ada") -> Asked:
        apis = [*APIS] if isinstance(keep_alive, str) else ["clear", *APIS]
        story = self._story
        return story._ask_for(
            length,
            NAME,
            api=self._random.choice(apis),
            tenant=tenant,
            gateway=story.gateways[0],
            keep_alive=keep_alive,
        )

    async def _answered(self, asked: Asked) -> None:
        assert asked.task is not None
        await asyncio.wait([asked.task], timeout=200.0)
        if asked.answer is None:
            self._story.wrong.append(f"request {asked.number} has no answer of {NAME}: {asked.error!r}")

    def _phase(self) -> int:
        coordinator = self._story.cluster.coordinator
        status = coordinator.driver.load_status(NAME) if coordinator is not None else None
        return int(status.phase) if status is not None else NOT_LOADED

    @property
    def _since(self) -> float:
        """When its ring has begun to serve."""
        return max(one.since for one in self._story.cluster.wires.served if one.ring == f"{NAME}-0")

    async def _until(self, holds: Callable[[], object], seconds: float) -> None:
        end = self._story.loop.time() + seconds
        while not holds() and self._story.loop.time() < end:
            await asyncio.sleep(0.5)

    def _left_at(self, due: float) -> None:
        """It has left now, and was to leave then."""
        late = self._story.loop.time() - due
        if not -0.5 <= late <= LATER + PUNCTUAL_SECONDS or self._phase() != NOT_LOADED:
            self._story.wrong.append(f"{NAME} was to leave {late:.1f} s ago, and is in phase {self._phase()}")
