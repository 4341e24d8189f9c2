"""Idle prefill: the beginning of a conversation's next prompt, computed while its ring has nothing to do.

Many templates leave out what was thought once the user asks again. All that came since the last question is
then rendered otherwise, tools' results with it, and the user waits until it is computed again. So after an
answer that ends a turn, the ring prefills the conversation with the answer and a short question in place of
the next one, which is not known. Its last tokens differ (OPENING in mesh.ring.prefix_names).

Any request pushes this aside. It takes no memory that something else has, and is counted as nobody's request.
Only prompts in clear: of a sealed one the gateway has no text. None with images: they would be decoded anew.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from sealring.gateway.scheduler.request import Request
from sealring.v1 import inference_pb2 as inference

MOST = 4
"""Conversations that wait for an idle ring, the newest: each holds a prompt of up to 4 MiB."""

LONGEST_ANSWER = 1 << 20
"""Characters of an answer that is remembered; longer ones are none of a chat."""

_QUESTION = "x"


@dataclass(slots=True)
class _Said:
    """An answer's text and what was thought before it, in the pieces in which they came."""

    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    characters: int = 0


class IdlePrefills:
    """The conversations that a ring may prefill while it is idle, and the one that it prefills."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}  # by request: the answer so far
        self._next: deque[Request] = deque(maxlen=MOST)
        self._numbers = itertools.count(1)
        self.running = ""
        """The id of the request that the scheduler has, or empty."""

    def begun(self, request: Request) -> None:
        """A client's request begins."""
        chat = request.envelope.clear.chat
        if chat.messages and not request.shows and request.choices == 1 and not request.progress.started:
            self._said[request.id] = _Said()

    def said(self, request_id: str, delta: inference.Delta) -> None:
        """A piece of its answer has come."""
        said = self._said.get(request_id)
        if said is None:
            return
        said.text.append(delta.text)
        said.thought.append(delta.parsed.reasoning)
        said.characters += len(delta.text) + len(delta.parsed.reasoning)
        if delta.parsed.tool_calls or said.characters > LONGEST_ANSWER:  # a tool's result is soon there
            del self._said[request_id]

    def finished(self, request: Request, finished: inference.Finished) -> None:
        """Its answer has ended."""
        said = self._said.pop(request.id, None)
        if said is None or finished.reason != inference.FINISH_REASON_STOP:
            return
        chat = inference.Chat()
        chat.CopyFrom(request.envelope.clear.chat)
        chat.call_required = False
        chat.messages.add(role="assistant", content="".join(said.text), reasoning="".join(said.thought))
        chat.messages.add(role="user", content=_QUESTION)
        self._next.append(
            Request(
                f"idle-{next(self._numbers)}",
                request.key,
                1,
                inference.Envelope(clear=inference.Prompt(chat=chat)),
                request.deployment,
                request.tenant,
                min_trust=request.min_trust,
                idle=True,
            )
        )

    def forget_but(self, request_ids: Container[str]) -> None:
        """Other requests than these are over, or elsewhere."""
        self._said = {each: said for each, said in self._said.items() if each in request_ids}

    def take(self) -> Request | None:
        """The next one to be prefilled, the newest first; it is `running` then."""
        if not self._next:
            return None
        request = self._next.pop()
        self.running = request.id
        return request

    def clear(self) -> None:
        """An epoch has ended."""
        self._next.clear()
