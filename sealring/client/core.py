"""Gateways, verified rosters and questions: the part of a client that does not wait."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar, Unpack, cast

import grpc

from sealring.client.choice import RingLoads
from sealring.client.question import Messages, Tools, chat_prompt, set_sampling, text_prompt
from sealring.client.types import Model, Options, RequestOptions, Ring, Trust
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import InvalidInput, SealringError, Unavailable
from sealring.mesh.names import is_alias, is_sha256, own_name, served_name
from sealring.mesh.prompt.options import SamplingOptions, is_card
from sealring.mesh.prompt.tools import capabilities_of
from sealring.mesh.ring.limits import MAX_ALIASES, MAX_CONTEXT
from sealring.mesh.roster.model import Roster, ring_min_trust
from sealring.mesh.rpc.problem import MAX_MESSAGE, one_line
from sealring.mesh.rpc.protocol12 import read_singly
from sealring.mesh.rpc.status import from_rpc_error
from sealring.v1 import inference_pb2 as inference
from sealring.v1.model_pb2 import ModelCard

ROSTER_SECONDS = 1.0
"""How long a roster that was fetched is used without asking the gateway for a newer one."""

CALL_SECONDS = 10.0
"""Deadline of a call that does not generate."""

_MAX_USER = 256
_MAX_MODELS = 4096
_MAX_TIME = 1 << 40
_MAX_ROWS = (1 << 32) - 1
_WORD = re.compile("[A-Za-z0-9_.-]{1,64}")

R = TypeVar("R")


class View(NamedTuple):
    """A verified roster, the answer that it came in, and how busy its rings are."""

    roster: Roster
    response: inference.GetRosterResponse
    loads: RingLoads

    def deployment(self, model: str) -> str:
        """The deployment that a name means: by the roster, else by the gateway's list of models and aliases.
        A name that neither knows stays as it is."""
        signed = sorted({ring.deployment for ring in self.roster.rings})
        named = self.named()
        names = sorted({*signed, *named})
        if (known := own_name(model, signed)) is not None:
            return known
        aliases = {alias: one.name for one in named.values() for alias in one.aliases}
        return served_name(model, names, aliases) or model

    def absent(self, deployment: str) -> bool:
        """Whether a model is on demand by the word of the gateway, and no ring of the roster serves it."""
        named = self.named().get(deployment)
        return bool(named and named.availability) and all(
            ring.deployment != deployment for ring in self.roster.rings
        )

    def named(self) -> dict[str, inference.Model]:
        """The gateway's word on each model, by name; the first one where it names a model twice."""
        found: dict[str, inference.Model] = {}
        for one in self.response.models[:_MAX_MODELS]:
            if _well_formed(one):
                read_singly(one, "card")
                found.setdefault(one.name, one)
        return found


class Newest:
    """The newest verified roster, and for how long it is used without asking for a newer one."""

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self._clock = clock
        self._fetched: tuple[float, View] | None = None

    @property
    def known(self) -> bool:
        """Whether there has been one."""
        return self._fetched is not None

    def set(self, view: View) -> None:
        """Takes one that was fetched just now."""
        self._fetched = (self._clock(), view)

    def recent(self) -> View | None:
        """The newest one, if it is at most ROSTER_SECONDS old."""
        if self._fetched is None or self._clock() - self._fetched[0] > ROSTER_SECONDS:
            return None
        return self._fetched[1]


class Gateways:
    """The gateways of one cluster, and which of them is asked: whichever answered last."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.use(addresses)

    def use(self, addresses: Sequence[str]) -> None:
        """Asks these from now on, the first one first."""
        self.addresses = tuple(addresses)
        self.current = self.addresses[0]

    def in_turn(self) -> tuple[str, ...]:
        """Each once, from the current one on."""
        if self.current not in self.addresses:  # an answer has come from one of before
            self.current = self.addresses[0]
        at = self.addresses.index(self.current)
        return self.addresses[at:] + self.addresses[:at]

    def lost(self, gateway: str) -> None:
        """Moves on to the next gateway, unless another answer that lost this one did so already."""
        if gateway == self.current:
            self.current = (*self.in_turn()[1:], gateway)[0]


class Asks(ABC, Generic[R]):
    """The questions that both clients take. `R` is the kind of reply that one gives."""

    @abstractmethod
    def ask(self, prompt: inference.Prompt, **options: Unpack[RequestOptions]) -> R:
        """Asks with a prompt of the contract as it is; otherwise as `chat`."""

    def chat(self, messages: Messages | str, *, tools: Tools = (), **options: Unpack[Options]) -> R:
        """Asks for the next message of a chat; `messages` are `{"role": ..., "content": ...}`, of which the
        content is a text, or a list of texts and of images, which are the bytes of their files. A text is a
        user's message. `tools` are functions that the model may call (`tool_calls` of the answer).

        Iterate the reply for its pieces, or take its `result`. Raises at once InvalidInput; while it is read
        RosterError (the gateway's roster is not believed), FailedPrecondition (TRUST_BELOW_FLOOR), NotFound
        (MODEL_NOT_FOUND), EnvelopeError (PLAINTEXT_REPLY, REPLY_CUT_OFF, ...), DeadlineExceeded,
        Unavailable, and the errors that the gateway answers with.
        """
        return self._ask(chat_prompt(messages, tools), options)

    def complete(self, text: str, **options: Unpack[Options]) -> R:
        """Asks for the continuation of a text, without the chat template; otherwise as `chat`."""
        return self._ask(text_prompt(text), options)

    def _ask(self, prompt: inference.Prompt, options: Options) -> R:
        prompt.prediction = options.pop("prediction", "")
        request = {name: options[name] for name in options if name in RequestOptions.__annotations__}  # type: ignore[literal-required]
        sampling = {name: options[name] for name in options if name not in request}  # type: ignore[literal-required]
        set_sampling(prompt, cast("SamplingOptions", sampling))
        return self.ask(prompt, **cast("RequestOptions", request))


def roster_failure(error: grpc.RpcError) -> SealringError:
    """What fetching a roster failed with. A gateway at whose address nobody answers is gone."""
    failed = from_rpc_error(error)
    if failed.reason != "DEADLINE_EXCEEDED":
        return failed
    return Unavailable(
        f"the gateway has not answered for {CALL_SECONDS:g} s", hint="check its address and that it runs"
    )


def metadata_of(api_key: str | None, user: str) -> tuple[tuple[str, str], ...] | None:
    """The metadata of each call. Raises InvalidInput (BAD_USER)."""
    if len(user) > _MAX_USER or not (user.isascii() and user.isprintable()):
        raise InvalidInput(
            "the user's name is malformed",
            hint=f"use at most {_MAX_USER} printable characters of ASCII",
            reason="BAD_USER",
            param="user",
        )
    key = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
    return (*key, *((("sealring-user", user),) if user else ())) or None


def _well_formed(model: inference.Model) -> bool:
    names = is_alias(model.name) and all(map(is_alias, model.aliases)) and len(model.aliases) <= MAX_ALIASES
    return names and model.context <= MAX_CONTEXT and len(model.reason) <= MAX_MESSAGE


def rings_of(roster: Roster) -> list[Ring]:
    """The rings of a verified roster."""
    return [Ring.from_roster(ring, roster) for ring in roster.rings]


def models_of(view: View) -> list[Model]:
    """The models of a verified roster, and those that the gateway can have loaded, by name."""
    serving = {load.ring: load for load in view.response.serving}
    models = {ring.deployment for ring in view.roster.rings}
    found = {name: model_of(name, view.roster, serving) for name in models}
    named = view.named()
    for name, one in named.items():
        if one.availability and name not in found:
            found[name] = Model(name, one.context, Trust(0), 0)
    return [_described(found[name], named.get(name)) for name in sorted(found)]


def _described(model: Model, named: inference.Model | None) -> Model:
    """The model with the gateway's word on its state and its other names."""
    if named is None:
        loaded = inference.MODEL_AVAILABILITY_LOADED if model.rings else model.availability
        return dataclasses.replace(model, availability=loaded)
    return dataclasses.replace(
        model,
        model_type=model.model_type or (named.model_type if _WORD.fullmatch(named.model_type) else ""),
        availability=named.availability,
        aliases=tuple(named.aliases),
        expires=min(max(named.expires, 0), _MAX_TIME),
        memory=named.memory,
        reason=one_line(named.reason, MAX_MESSAGE),
        progress=min(named.progress, 100),
        card=named.card if is_card(named.card) else ModelCard(),
        digest=model.digest or (named.digest if is_sha256(named.digest) else ""),
    )


def model_of(name: str, roster: Roster, serving: dict[str, inference.RingLoad]) -> Model:
    """A deployment by its rings in the roster, and by what the gateway reports of those that serve."""
    rings = [ring for ring in roster.rings if ring.deployment == name]
    loads = [serving[ring.id] for ring in rings if ring.id in serving]
    types = (load.model_type for load in loads)
    return Model(
        name=name,
        context=min(ring.context for ring in rings),
        min_trust=Trust(min(ring_min_trust(ring.members, roster.members) for ring in rings)),
        digest=rings[0].model_digest.hex(),
        rings=len(loads),
        model_type=next((kind for kind in types if _WORD.fullmatch(kind)), ""),
        rows=min(sum(load.rows for load in loads), _MAX_ROWS),
        capabilities=tuple(capabilities_of(one for load in loads for one in load.capabilities)),
    )
