"""What the asynchronous and the synchronous client have in common: everything but waiting."""

from __future__ import annotations

import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, Unpack

import grpc

from sealring.client.attempt import GONE
from sealring.client.choice import Loads
from sealring.client.options import SamplingOptions
from sealring.client.question import (
    Messages,
    Question,
    chat_prompt,
    routing_key_of,
    set_sampling,
    text_prompt,
)
from sealring.client.trust import RosterVerifier, parse_root_sha256
from sealring.client.types import Completion, Model, Ring
from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError, Unavailable
from sealring.mesh.prompt.tools import capabilities_of
from sealring.mesh.ring.routing import SECRET_BYTES
from sealring.mesh.roster.model import Roster, ring_min_trust
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.system.addresses import parse_address, require_loopback
from sealring.mesh.trust.levels import MAX_SCORE
from sealring.v1 import inference_pb2 as inference

ROSTER_SECONDS = 1.0
"""How long a roster that was fetched is used without asking the gateway for a newer one."""

CALL_SECONDS = 10.0
"""Deadline of a call that does not generate."""

_MAX_USER = 256
_MAX_ROWS = (1 << 32) - 1
_MODEL_TYPE = re.compile("[A-Za-z0-9_.-]{1,64}")

R = TypeVar("R")


class View(NamedTuple):
    """A verified roster, the answer that it came in, and how busy its rings are."""

    roster: Roster
    response: inference.GetRosterResponse
    loads: Loads


class Gateways:
    """The gateways of one cluster, and which of them is asked: whichever answered last."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self.current = self.addresses[0]

    def in_turn(self) -> tuple[str, ...]:
        """Each once, from the current one on."""
        at = self.addresses.index(self.current)
        return self.addresses[at:] + self.addresses[:at]

    def lost(self, gateway: str) -> None:
        """Whoever asks next begins with another one. Of many answers that lose a gateway one leaves it."""
        if gateway == self.current:
            self.current = (*self.in_turn()[1:], gateway)[0]


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


class ClientCore(ABC, Generic[R]):
    """Settings of a client and its verified roster. `R` is the kind of reply that it gives."""

    def __init__(
        self,
        gateway: str | Sequence[str],
        *,
        root_sha256: str | bytes,
        min_trust: int = 0,
        state_file: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        user: str = "",
    ) -> None:
        """A client of the gateway at `gateway` (host:port of its gRPC edge), or of several gateways of one
        cluster: when one is gone, answers go on over the next. Nothing is sent yet.

        `root_sha256` pins the cluster: the hash of its root key, 64 hexadecimal digits, learned from the
        operator and not from the gateway. `min_trust` (0 to 30) is a floor under what each call demands.
        `state_file` remembers the newest roster over restarts. `timeout` in seconds, at most 3600, holds for
        calls that set none; the envelope expires with it. Without `credentials` the connection to the gateway
        is not encrypted again, which costs a sealed prompt nothing but metadata. `api_key` is for gateways
        that ask for one; without `credentials` it is sent over loopback only. `user` is told to gateways that
        ask for no key: requests of different users take turns.

        Raises InvalidInput (BAD_ADDRESS, BAD_ROOT_HASH, BAD_MIN_TRUST, BAD_USER), ConfigError
        (LOOPBACK_ONLY).
        """
        addresses = [gateway] if isinstance(gateway, str) else list(gateway)
        if not addresses:
            raise InvalidInput("no gateway is named", hint="give host:port of one", reason="BAD_ADDRESS")
        self.gateways = Gateways(addresses)
        for address in self.gateways.addresses:
            parse_address(address)
            if api_key is not None and credentials is None:
                require_loopback(address)
        self._metadata = _metadata(api_key, user)
        if not 0 <= min_trust <= MAX_SCORE:
            raise InvalidInput(
                f"min_trust is not from 0 to {MAX_SCORE}", reason="BAD_MIN_TRUST", param="min_trust"
            )
        self._credentials = credentials
        self._floor = min_trust
        self._prefix_salt = secrets.token_bytes(32)
        self._routing_secret = secrets.token_bytes(SECRET_BYTES)
        self._timeout = timeout
        path = Path(state_file) if state_file is not None else None
        self._verifier = RosterVerifier(parse_root_sha256(root_sha256), path)
        self._fetched: tuple[float, View] | None = None
        self._set_up()

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        max_tokens: int = 0,
        min_trust: int = 0,
        timeout: float | None = None,
        n: int = 1,
        priority: int = 0,
        deadline_ms: int = 0,
        prompt_cache_key: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> R:
        """Asks for the next message of a chat; `messages` are `{"role": ..., "content": ...}`.

        `model` is a deployment's name, empty for the only one. `max_tokens` 0 is as many as the context
        holds. `sampling` takes `temperature`, `seed`, `stop`, penalties and more; without, an answer is
        greedy. A ring with a member that scores below `min_trust` gets nothing.

        `n` asks for so many answers, at most 8. `priority` (-10 to 10, the lower the earlier) and
        `deadline_ms` (begun within, or refused; 0: whenever) say where it waits among this client's others.
        Questions with one `prompt_cache_key` go to one ring while that is not too busy; without one the key
        is derived from how the conversation begins, with an empty one the least busy ring is taken. The key
        stays in this process.

        Iterate the reply for its pieces, or take its `result`. Raises at once InvalidInput; while it is read
        RosterError (the gateway's roster is not believed), FailedPrecondition (TRUST_BELOW_FLOOR), NotFound
        (MODEL_NOT_FOUND), EnvelopeError (PLAINTEXT_REPLY, REPLY_CUT_OFF, ...), DeadlineExceeded,
        Unavailable, and what else the gateway answers with.
        """
        prompt = chat_prompt(messages)
        set_sampling(prompt, sampling)
        return self.ask(
            prompt,
            model=model,
            max_tokens=max_tokens,
            min_trust=min_trust,
            timeout=timeout,
            n=n,
            priority=priority,
            deadline_ms=deadline_ms,
            prompt_cache_key=prompt_cache_key,
        )

    def complete(
        self,
        text: str,
        *,
        model: str = "",
        max_tokens: int = 0,
        min_trust: int = 0,
        timeout: float | None = None,
        n: int = 1,
        priority: int = 0,
        deadline_ms: int = 0,
        prompt_cache_key: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> R:
        """Asks for the continuation of a text, without the chat template; otherwise as `chat`."""
        prompt = text_prompt(text)
        set_sampling(prompt, sampling)
        return self.ask(
            prompt,
            model=model,
            max_tokens=max_tokens,
            min_trust=min_trust,
            timeout=timeout,
            n=n,
            priority=priority,
            deadline_ms=deadline_ms,
            prompt_cache_key=prompt_cache_key,
        )

    def ask(
        self,
        prompt: inference.Prompt,
        *,
        model: str = "",
        max_tokens: int = 0,
        min_trust: int = 0,
        timeout: float | None = None,
        n: int = 1,
        priority: int = 0,
        deadline_ms: int = 0,
        prompt_cache_key: str | None = None,
    ) -> R:
        """Asks with a prompt of the contract as it is; otherwise as `chat`."""
        return self._reply(
            Question(
                prompt,
                model,
                max_tokens,
                max(self._floor, min_trust),
                self._timeout if timeout is None else timeout,
                self._prefix_salt,
                priority,
                deadline_ms,
                n,
                routing_key_of(self._routing_secret, prompt_cache_key, prompt),
            )
        )

    @abstractmethod
    def _set_up(self) -> None:
        """What the kind of client needs besides; the last part of the constructor."""

    @abstractmethod
    def _reply(self, question: Question) -> R:
        """The reply to a question, which nobody has asked yet."""

    def _failed(self, error: grpc.RpcError, gateway: str) -> SealringError:
        """What a call failed with; a gateway that cannot answer any call is left."""
        failed = from_rpc_error(error)
        if failed.reason in GONE:
            self.gateways.lost(gateway)
        return failed

    def _recent(self) -> View | None:
        if self._fetched is None or time.monotonic() - self._fetched[0] > ROSTER_SECONDS:
            return None
        return self._fetched[1]

    def _verify(self, response: inference.GetRosterResponse) -> View:
        view = View(self._verifier.verify(response), response, Loads(response.serving))
        self._fetched = (time.monotonic(), view)
        return view


def roster_failure(error: grpc.RpcError) -> SealringError:
    """What fetching a roster failed with. A gateway at whose address nobody answers is gone."""
    failed = from_rpc_error(error)
    if failed.reason != "DEADLINE_EXCEEDED":
        return failed
    return Unavailable(
        f"the gateway has not answered for {CALL_SECONDS:g} s", hint="check its address and that it runs"
    )


def _metadata(api_key: str | None, user: str) -> tuple[tuple[str, str], ...] | None:
    if len(user) > _MAX_USER or not (user.isascii() and user.isprintable()):
        raise InvalidInput(
            "the user's name is malformed",
            hint=f"use at most {_MAX_USER} printable characters of ASCII",
            reason="BAD_USER",
            param="user",
        )
    key = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
    return (*key, *((("sealring-user", user),) if user else ())) or None


def rings_of(roster: Roster) -> list[Ring]:
    """The rings of a verified roster."""
    return [Ring.from_roster(ring, roster) for ring in roster.rings]


def models_of(view: View) -> list[Model]:
    """The models of a verified roster, by name."""
    serving = {load.ring: load for load in view.response.serving}
    names = sorted({ring.deployment for ring in view.roster.rings})
    return [_model(name, view.roster, serving) for name in names]


def _model(name: str, roster: Roster, serving: dict[str, inference.RingLoad]) -> Model:
    rings = [ring for ring in roster.rings if ring.deployment == name]
    loads = [serving[ring.id] for ring in rings if ring.id in serving]
    types = (load.model_type for load in loads)
    return Model(
        name=name,
        context=min(ring.context for ring in rings),
        min_trust=min(ring_min_trust(ring.members, roster.members) for ring in rings),
        rings=len(loads),
        model_type=next((kind for kind in types if _MODEL_TYPE.fullmatch(kind)), ""),
        rows=min(sum(load.rows for load in loads), _MAX_ROWS),
        capabilities=tuple(capabilities_of(one for load in loads for one in load.capabilities)),
    )
