"""Clients of HTTP that do not do their part of a connection, in a simulated cluster, and who judges it."""

# ruff: noqa: SLF001 - it is a part of the story

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import h11
from simulatedhttp import APIS
from simulatedsockets import Connection, EdgeInMemory, request_of

from sealring.edge.http.body import BODY_SECONDS
from sealring.edge.http.protocol import HEADER_SECONDS
from sealring.edge.inference.timers import SEND_SECONDS

if TYPE_CHECKING:
    from stories import Story

OFTEN = 0.3
FULL_SECONDS = 30.0
"""An answer has filled the buffers of its connection within this time, though steps are slow."""

PUNCTUAL_SECONDS = 5.0


class SocketStories:
    """The connections of one story's gateways. They have random numbers of their own."""

    def __init__(self, story: Story) -> None:
        self._story, self._random = story, random.Random(f"sockets {story.seed}")

    async def at_rest(self) -> None:
        """A client does not read, or sends half of a request: its connection ends in time, and no other."""
        story, cluster = self._story, self._story.cluster
        name = story.gateways[0]
        self._nothing_is_open()
        if self._random.random() < OFTEN:
            scene = self._random.choice((self._reads_nothing, self._half_a_head, self._half_a_body))
            story.note(f"a client of {name}: {scene.__name__}")
            await cluster.run(name, scene(cluster.edges[name], cluster.keys[name, "ada"]))
            self._nothing_is_open()
            await story._nothing_is_held()

    def _nothing_is_open(self) -> None:
        """No client has a connection."""
        for name, edge in self._story.cluster.edges.items():
            if edge.connections and not edge.process.ended:
                self._story.wrong.append(f"{name} keeps {edge.connections} connections of nobody")

    async def _reads_nothing(self, edge: EdgeInMemory, key: str) -> None:
        story = self._story
        other = story._ask_for(3, "first", api="clear")
        connection, whole = self._begin(edge, key)
        connection.write(whole)
        await connection.read()
        await self._ends(edge, connection, SEND_SECONDS, FULL_SECONDS)
        if other.answer is None:
            story.wrong.append(f"request {other.number} waits for a client that does not read")

    async def _half_a_head(self, edge: EdgeInMemory, key: str) -> None:
        connection, whole = self._begin(edge, key)
        connection.write(whole[: whole.index(b"\r\n\r\n")])
        await self._ends(edge, connection, HEADER_SECONDS)

    async def _half_a_body(self, edge: EdgeInMemory, key: str) -> None:
        connection, whole = self._begin(edge, key)
        connection.write(whole[:-20])
        if self._random.random() < 0.5:
            connection.close()
            await self._ends(edge, connection, 0.0)
        else:
            await self._ends(edge, connection, BODY_SECONDS, HEADER_SECONDS)

    def _begin(self, edge: EdgeInMemory, key: str) -> tuple[Connection, bytes]:
        """A connection, and the bytes of a request with a long answer."""
        story, api = self._story, APIS["chat"]
        body = api.asks(f"c{story.seed} say:60 x") | {"model": "first"}
        whole = request_of(h11.Connection(h11.CLIENT), api.path, key, body)
        return Connection(edge, story.cluster.network), whole

    async def _ends(
        self, edge: EdgeInMemory, connection: Connection, seconds: float, more: float = 0.0
    ) -> None:
        """The server ends the connection after `seconds`, and after `more` seconds beyond these at most."""
        loop = self._story.loop
        begun = loop.time()
        await asyncio.sleep(0.1)  # it has arrived
        while edge.connections and loop.time() < begun + seconds + more + PUNCTUAL_SECONDS:
            await asyncio.sleep(0.5)
        took = loop.time() - begun
        if edge.connections or took < seconds - 1.0:
            self._story.wrong.append(f"a connection whose time is {seconds:g} s has {took:.1f} s")
        connection.close()
