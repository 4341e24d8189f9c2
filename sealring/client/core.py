"""What the asynchronous and the synchronous client have in common: everything but waiting."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Generic, TypeVar, Unpack

import grpc

from mesh.addresses import parse_address, require_loopback
from mesh.errors import FailedPrecondition, InvalidInput
from mesh.roster import Roster, ring_min_trust
from mesh.trust import MAX_SCORE
from sealring.client.options import SamplingOptions
from sealring.client.question import Messages, Question, chat_prompt, set_sampling, text_prompt
from sealring.client.trust import RosterVerifier, parse_root_sha256
from sealring.client.types import Completion, Model, Ring
from sealring.v1 import inference_pb2 as inference

ROSTER_SECONDS = 1.0
"""How long a roster that was fetched is used without asking the gateway for a newer one."""

CALL_SECONDS = 10.0
"""Deadline of a call that does not generate."""

R = TypeVar("R")


class ReplyState:
    """What is known of one answer so far. Its stream writes, its reply object reads."""

    def __init__(self) -> None:
        self.ring: Ring | None = None
        self.completion: Completion | None = None

    def set_ring(self, ring: Ring) -> None:
        self.ring = ring


class ReplyView:
    """The part of a reply that does not wait."""

    def __init__(self, state: ReplyState) -> None:
        self._state = state

    @property
    def ring(self) -> Ring | None:
        """Who sees the prompt, known from the first piece of the answer on."""
        return self._state.ring

    @property
    def completion(self) -> Completion:
        """The whole answer with usage and finish reason. Raises FailedPrecondition (NOT_FINISHED)."""
        if self._state.completion is None:
            raise FailedPrecondition("the answer has not ended", reason="NOT_FINISHED")
        return self._state.completion


class ClientCore(Generic[R]):
    """Settings of a client and its verified roster. `R` is the kind of reply that it gives."""

    def __init__(
        self,
        gateway: str,
        *,
        root_sha256: str | bytes,
        min_trust: int = 0,
        state_file: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
    ) -> None:
        """A client of the gateway at `gateway` (host:port of its gRPC edge). Nothing is sent yet.

        `root_sha256` pins the cluster: the hash of its root key, 64 hexadecimal digits, learned from the
        operator and not from the gateway. `min_trust` (0 to 30) is a floor under what each call demands.
        `state_file` remembers the newest roster over restarts. `timeout` in seconds, at most 3600, holds for
        calls that set none; the envelope expires with it. Without `credentials` the connection to the gateway
        is not encrypted again, which costs a sealed prompt nothing but metadata. `api_key` is for gateways
        that ask for one; without `credentials` it is sent over loopback only.

        Raises InvalidInput (BAD_ADDRESS, BAD_ROOT_HASH, BAD_MIN_TRUST), ConfigError (LOOPBACK_ONLY).
        """
        parse_address(gateway)
        if api_key is not None and credentials is None:
            require_loopback(gateway)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else None
        if not 0 <= min_trust <= MAX_SCORE:
            raise InvalidInput(
                f"min_trust is not from 0 to {MAX_SCORE}", reason="BAD_MIN_TRUST", param="min_trust"
            )
        self.gateway = gateway
        self._credentials = credentials
        self._floor = min_trust
        self._prefix_salt = secrets.token_bytes(32)
        self._timeout = timeout
        path = Path(state_file) if state_file is not None else None
        self._verifier = RosterVerifier(parse_root_sha256(root_sha256), path)
        self._fetched: tuple[float, Roster, inference.GetRosterResponse] | None = None
        self._set_up()

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        max_tokens: int = 0,
        min_trust: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> R:
        """Asks for the next message of a chat; `messages` are `{"role": ..., "content": ...}`.

        `model` is a deployment's name, empty for the only one. `max_tokens` 0 is as many as the context
        holds. `sampling` takes `temperature`, `seed`, `stop`, penalties and more; without, an answer is
        greedy. A ring with a member that scores below `min_trust` gets nothing.

        Iterate the reply for its pieces, or take its `result`. Raises at once InvalidInput; while it is read
        RosterError (the gateway's roster is not believed), FailedPrecondition (TRUST_BELOW_FLOOR), NotFound
        (MODEL_NOT_FOUND), EnvelopeError (PLAINTEXT_REPLY, REPLY_CUT_OFF, ...), DeadlineExceeded,
        Unavailable, and what else the gateway answers with.
        """
        prompt = chat_prompt(messages)
        set_sampling(prompt, sampling)
        return self.ask(prompt, model=model, max_tokens=max_tokens, min_trust=min_trust, timeout=timeout)

    def complete(
        self,
        text: str,
        *,
        model: str = "",
        max_tokens: int = 0,
        min_trust: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> R:
        """Asks for the continuation of a text, without the chat template; otherwise as `chat`."""
        prompt = text_prompt(text)
        set_sampling(prompt, sampling)
        return self.ask(prompt, model=model, max_tokens=max_tokens, min_trust=min_trust, timeout=timeout)

    def ask(
        self,
        prompt: inference.Prompt,
        *,
        model: str = "",
        max_tokens: int = 0,
        min_trust: int = 0,
        timeout: float | None = None,
        priority: int = 0,
        deadline_ms: int = 0,
        n: int = 1,
    ) -> R:
        """Asks with a prompt of the contract as it is, for `n` answers; otherwise as `chat`.

        `priority` and `deadline_ms` are GenerateRequest's.
        """
        floor, seconds = max(self._floor, min_trust), timeout or self._timeout
        return self._reply(
            Question(prompt, model, max_tokens, floor, seconds, self._prefix_salt, priority, deadline_ms, n)
        )

    def _set_up(self) -> None:
        """What the kind of client needs besides; the last part of the constructor."""
        raise NotImplementedError

    def _reply(self, question: Question) -> R:
        raise NotImplementedError

    def _recent(self) -> tuple[Roster, inference.GetRosterResponse] | None:
        if self._fetched is None or time.monotonic() - self._fetched[0] > ROSTER_SECONDS:
            return None
        return self._fetched[1:]

    def _verify(self, response: inference.GetRosterResponse) -> tuple[Roster, inference.GetRosterResponse]:
        roster = self._verifier.verify(response)
        self._fetched = (time.monotonic(), roster, response)
        return roster, response


def rings_of(roster: Roster) -> list[Ring]:
    """The rings of a verified roster."""
    return [Ring.from_roster(ring, roster) for ring in roster.rings]


def models_of(roster: Roster, response: inference.GetRosterResponse) -> list[Model]:
    """The models of a verified roster, by name."""
    serving = {load.ring for load in response.serving}
    names = sorted({ring.deployment for ring in roster.rings})
    return [_model(name, roster, serving) for name in names]


def _model(name: str, roster: Roster, serving: set[str]) -> Model:
    rings = [ring for ring in roster.rings if ring.deployment == name]
    return Model(
        name=name,
        context=min(ring.context for ring in rings),
        min_trust=min(ring_min_trust(ring.members, roster.members) for ring in rings),
        rings=sum(ring.id in serving for ring in rings),
    )
