"""What reaches the head of a ring: own requests, those of guests, and those that it forwards as a guest."""

from __future__ import annotations

from typing import Protocol

import structlog

from sealring.edge.inference.answer import AnswerWriter
from sealring.gateway.rings.epoch import Epoch
from sealring.mesh.errors import ResourceExhausted
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

FREE_UNREAD, MAX_UNREAD, ALL_UNREAD = 64 << 10, 4 << 20, 32 << 20
"""Bytes of unread answers: free for each answer, most for one answer, most for all answers of a ring. A
client in step has none: text is joined, and connections have buffers of their own. 4 MiB are a million tokens
of text, or a thousand with the log-probabilities of 20 others each."""


class Requests(Protocol):
    """Requests of a ring that reach its head in the same way.

    `OwnRequests` come from this gateway's clients, and it schedules them. `ServedRequests` are scheduled here
    for other gateways, the ring's guests. `ForwardedRequests` come from this gateway's clients while another
    gateway schedules.
    """

    def begin(self, epoch: Epoch) -> None:
        """An epoch begins in which such requests are taken."""

    def hear(self, response: control.ScheduleResponse) -> None:
        """Takes a message of a member. Raises InvalidInput where it breaks the protocol."""

    def cancel(self, request_id: str) -> None:
        """Ends a request whose answer nobody reads any more."""

    def end(self, reason: str) -> None:
        """The epoch has ended. What can go on waits for the next one."""


class Answers(dict[str, AnswerWriter]):
    """The answers of a ring's requests, by request, until they are over."""

    def __init__(self, ring: str) -> None:
        super().__init__()
        self._ring = ring

    def give_up_behind(self, request_id: str) -> str:
        """Gives up an answer whose reader is too far behind, and returns its request, else "". If only all
        readers together are, that is the answer with most unread: a client that reads pays for no other
        one."""
        unread = self[request_id].unread
        if unread <= FREE_UNREAD:
            return ""
        if unread <= MAX_UNREAD:
            if sum(each.unread for each in self.values()) <= ALL_UNREAD:
                return ""
            request_id = max(self, key=lambda each: self[each].unread)
        log.warning("reader_behind", request_id=request_id, ring=self._ring)
        self.pop(request_id).give_up(
            ResourceExhausted(
                "the client is too far behind in reading its answer",
                hint="read faster, or ask for less",
                reason="CLIENT_BEHIND",
            )
        )
        return request_id
