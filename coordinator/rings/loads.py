"""The models on demand: which is loaded next, and which is unloaded for it. Pure; time is an argument.

    NOT_LOADED --asked for--> WAITING --room--> LOADING --its rings serve--> LOADED
        ^                                                                      |
        +--no request is under way-- YIELDING <--idle for keep_alive, or room for another one is needed

A model that yields begins no further request and finishes those under way, so no answer is cut off. Names are
those of deployments, times are seconds of a monotonic clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sealring.mesh.errors import SealringError, Unavailable

TURN_SECONDS = 60.0
"""Shortest time for which a model stays loaded before it is unloaded to make room, or at a client's wish.

Policy: a Mac reads 16 to 128 GB of weights in 5 to 60 s. So two models that do not fit together and are asked
for by turns answer for at least half of the time, and each waits for about two minutes at most.
"""

TRIES = 3
"""Loads in a row that may fail before what waits for the model fails with the reason."""

RETRY_SECONDS = 15
"""Time after a failure in which requests get its error at once, unless a node or a deployment changes: enough
for an operator or a node to act."""

LOOK_SECONDS = 5.0
"""Longest time until a model that found no room looks again: nodes may have come."""


class LoadPhase(enum.Enum):
    """The phase of a model on demand."""

    NOT_LOADED = "not loaded"
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    YIELDING = "yielding"


_HOLDS_MEMORY = (LoadPhase.LOADING, LoadPhase.LOADED, LoadPhase.YIELDING)


@dataclass(frozen=True)
class Policy:
    """The operator's wishes: seconds without a request until it is unloaded, and whether it makes room."""

    keep_alive: float
    pinned: bool = False


@dataclass(frozen=True)
class Heard:
    """What gateways and nodes report of a model.

    `active`: requests are under way. `waiting`: requests that no ring has begun. `used`: it was asked for
    since the last report. `holding`: every gateway holds back the waiting ones. `keep_alive` are the seconds
    from the last use on for which a client wants it, if any has named a time.
    """

    active: bool = False
    waiting: int = 0
    used: bool = False
    holding: bool = False
    keep_alive: float | None = None


@dataclass
class Load:
    """One model. `since` is the begin of its phase, `used` the time of its last use, `loaded` the time at
    which its rings served. Requests have waited for it since `asked_since`."""

    policy: Policy
    phase: LoadPhase
    since: float
    used: float
    heard: Heard = field(default_factory=Heard)
    yields_to: str = ""
    """The model that needs the room; "" while it is unloaded for its idleness."""

    loaded: float = -math.inf
    asked_since: float = math.inf
    not_before: float = -math.inf
    tries: int = 0
    took: float = 0.0
    """Seconds of its last load; 0 before the first."""

    reason: str = ""
    error: SealringError | None = None

    @property
    def keep_alive(self) -> float:
        """Seconds without a request until it is unloaded."""
        named = self.heard.keep_alive
        return self.policy.keep_alive if named is None else named

    def until(self, turn: float) -> float:
        """The time until which it stays though nobody uses it: it has its turn at least."""
        return max(self.used + self.keep_alive, self.loaded + turn)

    @property
    def wanted(self) -> bool:
        """Whether requests wait for it or are under way."""
        return self.heard.active or self.heard.waiting > 0

    @property
    def quiet(self) -> bool:
        """Whether it can be unloaded without a request that notices."""
        return self.heard.holding and not self.heard.active

    def enter(self, phase: LoadPhase, now: float) -> None:
        """Changes the phase."""
        self.phase, self.since, self.yields_to, self.reason = phase, now, "", ""


@dataclass(frozen=True)
class Victims:
    """The models that may make room: those that may `now`, the longest idle first, and those that may
    `later`, the first of them at the time `at`."""

    now: tuple[str, ...]
    later: tuple[str, ...]
    at: float

    @property
    def all(self) -> tuple[str, ...]:
        """Those that may make room at any time."""
        return (*self.now, *self.later)


class Loads:
    """The machine of all models on demand."""

    def __init__(self, turn: float | None = None) -> None:
        self.models: dict[str, Load] = {}
        self.turn = TURN_SECONDS if turn is None else turn

    def sync(self, deployed: Mapping[str, tuple[Policy, bool]], now: float) -> None:
        """Takes the stored deployments: each one's policy, and whether it has rings."""
        for name in self.models.keys() - deployed.keys():
            del self.models[name]
            self.keep_all(name, now)
        for name, (policy, has_rings) in deployed.items():
            load = self.models.get(name)
            if load is None:
                phase = LoadPhase.LOADING if has_rings else LoadPhase.NOT_LOADED
                load = self.models[name] = Load(policy, phase, now, now)
            elif has_rings != (load.phase in _HOLDS_MEMORY):  # it was deleted and deployed anew
                load.enter(LoadPhase.LOADING if has_rings else LoadPhase.NOT_LOADED, now)
            load.policy = policy

    def hear(self, name: str, heard: Heard, now: float) -> None:
        """Takes the newest reports of one model."""
        load = self.models[name]
        was_wanted, load.heard = load.wanted, heard
        if was_wanted or load.wanted or heard.used:
            load.used = now
        if not load.wanted:
            load.asked_since = math.inf
        if load.phase is LoadPhase.NOT_LOADED and load.wanted and now >= load.not_before:
            load.enter(LoadPhase.WAITING, now)
            load.asked_since, load.error = min(load.asked_since, now), None
        elif load.phase is LoadPhase.WAITING and not load.wanted:
            load.enter(LoadPhase.NOT_LOADED, now)
            self.keep_all(name, now)
        elif load.error is not None and now >= load.not_before:
            load.error = None

    def tick(self, now: float) -> list[str]:
        """Unloads models that nobody uses: those that have yielded, and those whose rings do not form."""
        due = []
        for name, load in self.models.items():
            idle = not load.wanted and now >= load.until(self.turn)
            if load.phase is LoadPhase.LOADED and idle:
                load.enter(LoadPhase.YIELDING, now)
            elif load.phase is LoadPhase.YIELDING and not idle and not load.yields_to:
                load.enter(LoadPhase.LOADED, now)
            unused = load.phase is LoadPhase.YIELDING and not load.yields_to and load.quiet
            if unused or (load.phase is LoadPhase.LOADING and idle and now >= load.since + self.turn):
                due.append(name)
        for name in due:
            self.unloaded(name, now)
        return due

    def waiting(self, now: float) -> list[str]:
        """The models that wait for room and should look for it now, the longest waiting first."""
        found = [name for name, load in self.models.items() if load.phase is LoadPhase.WAITING]
        due = (name for name in found if now >= self.models[name].not_before and self.freed(name) is not None)
        return sorted(due, key=lambda name: (self.models[name].asked_since, name))

    @property
    def yielded_to(self) -> str:
        """The model for which others make room; "" without one."""
        return next((load.yields_to for load in self.models.values() if load.yields_to), "")

    def victims(self, name: str, now: float) -> Victims:
        """The models that may make room for another one; never one that is pinned."""
        able, later, at = [], [], math.inf
        for other, load in self.models.items():
            if other == name or load.policy.pinned or load.phase not in _HOLDS_MEMORY:
                continue
            over = load.loaded + self.turn
            if load.phase is not LoadPhase.LOADING and now >= over and load.yields_to in ("", name):
                able.append(other)
            else:
                later.append(other)
                at = min(at, over if now < over else now + LOOK_SECONDS)
        able.sort(key=lambda one: (self.models[one].wanted, self.models[one].used, one))
        return Victims(tuple(able), tuple(later), at)

    def make_room(self, name: str, victims: Sequence[str], now: float) -> None:
        """Has models yield to one that waits."""
        allowed = self.victims(name, now).now
        for victim in victims:
            if victim in allowed:
                self.models[victim].enter(LoadPhase.YIELDING, now)
                self.models[victim].yields_to = name
                self.models[victim].reason = f"it makes room for {name}"
        if victims:
            self.models[name].reason = f"{and_(victims)} {verb(victims)} unloaded for it"

    def freed(self, name: str) -> list[str] | None:
        """The models that have yielded to this one; None while one of them is not quiet."""
        found = [other for other, load in self.models.items() if load.yields_to == name]
        return found if all(self.models[other].quiet for other in found) else None

    def unloaded(self, name: str, now: float) -> None:
        """It has no rings any more."""
        self.models[name].enter(LoadPhase.NOT_LOADED, now)
        self.look_anew(now)

    def look_anew(self, now: float) -> None:
        """A node or a deployment has changed: what was refused may be asked for again, and what waits looks
        for room."""
        for load in self.models.values():
            if load.error is not None or load.phase is LoadPhase.WAITING:
                load.error, load.not_before = None, now

    def postponed(self, name: str, victims: Victims, now: float) -> None:
        """It fits once others may be unloaded that may not yet."""
        load = self.models[name]
        load.not_before = min(max(victims.at, now), now + LOOK_SECONDS)
        held = [one for one in victims.later if self.models[one].phase is LoadPhase.LOADED]
        if self.yielded_to:
            load.reason = f"{self.yielded_to} is loaded before it"
        elif held:
            load.reason = f"a model stays loaded for {self.turn:g} s at least, and so does {and_(held)}"
        elif victims.later:
            load.reason = f"{and_(victims.later)} {verb(victims.later)} loaded before it"

    def refused(self, name: str, error: SealringError, now: float) -> None:
        """It cannot be loaded: what waits for it gets the error, and so do requests of the next seconds."""
        load = self.models[name]
        load.enter(LoadPhase.NOT_LOADED, now)
        load.error, load.not_before, load.tries = error, now + RETRY_SECONDS, 0
        load.asked_since = math.inf
        self.keep_all(name, now)

    def serving(self, name: str, now: float) -> None:
        """All of its rings serve."""
        load = self.models[name]
        if load.phase is LoadPhase.LOADING:
            load.took, load.tries, load.used, load.loaded = now - load.since, 0, now, now
            load.enter(LoadPhase.LOADED, now)
            load.asked_since = math.inf

    def stuck(self, name: str, why: str, now: float) -> None:
        """The rings did not form, and the model was unloaded: it is placed anew, or given up after TRIES."""
        load = self.models[name]
        load.tries, load.not_before = load.tries + 1, now
        if load.tries < TRIES:
            self.unloaded(name, now)
            return
        self.refused(name, not_loaded(name, why), now)

    def seconds(self, name: str, now: float) -> float:
        """Estimate of the time until a model is loaded; 0 if it is not known."""
        load = self.models[name]
        if load.phase is LoadPhase.LOADING:
            return max(1.0, load.took - (now - load.since)) if load.took else 0.0
        if load.phase is LoadPhase.WAITING:
            victims = self.victims(name, now)
            turn = victims.at - now if not victims.now and math.isfinite(victims.at) else 0.0
            return max(0.0, turn) + load.took
        return load.took if load.phase is LoadPhase.NOT_LOADED else 0.0

    def expires(self, name: str) -> float:
        """When it is unloaded unless it is used, or since when it is being unloaded; inf if it is neither."""
        load = self.models[name]
        if load.phase is LoadPhase.YIELDING:
            return load.since
        return load.until(self.turn) if load.phase in (LoadPhase.LOADING, LoadPhase.LOADED) else math.inf

    def keep_all(self, name: str, now: float) -> None:
        """Nobody has to make room for this model any more."""
        for load in self.models.values():
            if load.yields_to == name:
                load.enter(LoadPhase.LOADED, now)


def not_loaded(name: str, why: str) -> Unavailable:
    """The error of a model that cannot be loaded now, and may be in a while."""
    return Unavailable(
        f"{name} cannot be loaded: {why}",
        hint="try again later; the cluster's operator finds more with: sealring status",
        reason="MODEL_NOT_LOADED",
        retry_after=RETRY_SECONDS,
    )


async def fewest(
    victims: Sequence[str], fits: Callable[[Sequence[str]], Awaitable[bool]]
) -> list[str] | None:
    """The models to unload, of the first in the list as few as leave enough room; None if all do not."""
    for count in range(len(victims) + 1):
        if await fits(victims[:count]):
            break
    else:
        return None
    chosen = list(victims[:count])
    for one in chosen[:-1]:
        without = [other for other in chosen if other != one]
        if await fits(without):
            chosen = without
    return chosen


def and_(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:4])


def verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
