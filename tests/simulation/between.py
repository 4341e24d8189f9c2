"""What stands between a coordinator and its nodes: it loses messages, and repeats old ones.

No coordinator and no node of this release does either. A cluster has to bear it all the same, as from another
release, or from a coordinator that was broken into.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from sealring.coordinator.main import Coordinator
from sealring.coordinator.services.node_messages import NodeMessages
from sealring.coordinator.streams.sessions import NodeSession
from sealring.mesh.roster import Roster, RosterReader
from sealring.v1.membership_pb2 import CoordinatorMessage, MemberMessage, RosterUpdate

_KEPT = 8


class Between:
    """One for all; `wrong` has what machines do that is never right."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        """The kinds of messages that do not arrive, in either direction."""
        self.wrong: list[str] = []
        self._prepared: dict[str, list[CoordinatorMessage]] = {}
        self._rosters: dict[Path, int] = {}
        send, take, accept = NodeSession.send, NodeMessages.take, RosterReader.accept

        @functools.wraps(send)
        def sends(session: NodeSession, message: CoordinatorMessage) -> None:
            kind = message.WhichOneof("message")
            if kind == "prepare":
                kept = self._prepared.setdefault(session.member, [])
                kept.append(message)
                del kept[:-_KEPT]
            if kind not in self.lost:
                send(session, message)

        @functools.wraps(take)
        def takes(messages: NodeMessages, session: NodeSession, message: MemberMessage) -> bool:
            return message.WhichOneof("message") not in self.lost and take(messages, session, message)

        @functools.wraps(accept)
        def accepts(reader: RosterReader, envelope: bytes) -> Roster:
            roster = accept(reader, envelope)
            memory: Any = reader.memory
            if (path := getattr(memory, "path", None)) is not None:
                if roster.version < self._rosters.get(path, 0):
                    self.wrong.append(
                        f"{path} has roster {self._rosters[path]}, and {roster.version} is used"
                    )
                self._rosters[path] = max(roster.version, self._rosters.get(path, 0))
            return roster

        NodeSession.send, NodeMessages.take = sends, takes  # type: ignore[method-assign]
        RosterReader.accept = accepts  # type: ignore[method-assign]

    def repeat(self, coordinator: Coordinator, source: Random) -> None:
        """Sends each node its old epochs again, and then an old roster."""
        version = source.randrange(1, coordinator.publisher.current.version)
        for session in coordinator.sessions:
            for message in self._old(session.member):
                session.send(message)
            found = coordinator.store.rosters.find(version)
            if found is not None:
                session.send(CoordinatorMessage(roster=RosterUpdate(envelope=found.envelope)))

    def _old(self, member: str) -> Iterable[CoordinatorMessage]:
        kept = self._prepared.get(member, [])
        newest = {one.prepare.ring: one.prepare.epoch for one in kept}
        return [one for one in kept if one.prepare.epoch < newest[one.prepare.ring]]
