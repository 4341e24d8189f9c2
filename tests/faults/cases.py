"""The fault matrix: what happens, and when. `acts.py` says what each kind of act is.

Parts are named by the rank that they have when it happens: `engine 0` is the head's.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("engine 0", "engine 2", "carrier 1", "daemon 1", "gateway", "coordinator")
MOMENTS = ("start", "handshake", "epoch", "prefill", "decode", "drain")
"""start: while the part itself starts. handshake, epoch: while a ring forms, before and after there are keys.
prefill, decode: in the midst of 13 answers. drain: as rank 1 is drained and a spare takes over. A further one
is load: while a model on demand is loaded for these answers."""


@dataclass(frozen=True)
class Case:
    """`acts` happen together, each `kind target...` with seconds where it lasts."""

    moment: str
    acts: tuple[str, ...]
    certificates: int = 0
    """Seconds that the cluster's certificates live, where that is not as usual."""
    standby: bool = False
    """The coordinator has one. When the case is over, that is the coordinator."""

    @property
    def on_demand(self) -> bool:
        """Whether its model is on demand."""
        return self.moment == "load"

    @property
    def again(self) -> bool:
        """Whether connections of clients end, so that clients that ask in clear have to ask again."""
        return any("gateway" in each or "client" in each for each in self.acts)

    @property
    def name(self) -> str:
        return f"{' + '.join(self.acts)}, {self.moment}"


def case(moment: str, *acts: str) -> Case:
    return Case(moment, acts)


KILLED = [case(moment, f"kill {part}") for part in PARTS for moment in MOMENTS]
STOPPED = [case(moment, f"stop {part} 8") for part in PARTS for moment in MOMENTS]
BATTERED = [case("decode", "batter engine 0 30")]
FROZEN = [case("decode", f"freeze {part} 8") for part in PARTS]
TWICE = [
    case("decode", "kill engine 0", "kill engine 2"),
    case("decode", "kill engine 1", "stop carrier 2 8"),
    case("decode", "kill coordinator", "kill carrier 1"),
    case("decode", "kill coordinator", "kill daemon 2"),
    case("decode", "kill gateway", "kill engine 0"),
    case("prefill", "kill gateway", "kill coordinator"),
]
GONE = [case("decode", "gone daemon 2"), case("decode", "memory engine 1"), case("decode", "memory engine 0")]
SCARCE = [case("decode", f"scarce daemon {rank}") for rank in (0, 1)]
NETWORK = [
    *(case("decode", f"cut daemon 1 {way} 8") for way in ("both", "in", "out")),
    *(case("decode", f"cut coordinator {way} 8") for way in ("both", "in", "out")),
    *(case(moment, "lose daemon 1 0.05 8") for moment in ("prefill", "decode", "handshake")),
    *(case(moment, "delay daemon 1 0.2 8") for moment in ("prefill", "decode", "handshake")),
    *(case(moment, "narrow daemon 1 1e6 8") for moment in ("prefill", "decode", "handshake")),
    *(case("decode", f"reset {what}") for what in ("ring", "control", "session", "watch", "client")),
    case("decode", "flip daemon 1"),
]
DISK = [
    case("decode", "fill coordinator 8", "kill carrier 1"),
    case("decode", "fill daemon 1 8", "roster"),
    case("decode", "fill gateway 8", "roster"),
    *(case("decode", f"readonly {part} 8") for part in ("coordinator", "daemon 1", "gateway")),
]
CACHE = [case("decode", f"cache {how} 1") for how in ("full", "readonly", "slow", "damaged")]
"""The disk on which a member stores prefixes, as a prompt is asked for that is on it."""
CLOCK = [
    case("decode", f"clock {part} {step} {seconds}")
    for part in ("coordinator", "daemon 1", "gateway")
    for step, seconds in (("+3600", 8), ("-3600", 8), ("+3600", 100))
]
"""For seconds, and for longer than until the wrong time is believed."""
STARTS = [
    *(case("decode", f"taken {part} 4") for part in ("coordinator", "daemon 1", "gateway")),
    *(case("decode", f"double {part}") for part in ("coordinator", "daemon 1", "gateway")),
    case("decode", "copied daemon 1 8"),
    case("decode", "wrong daemon 1"),
    case("decode", "leave"),
    case("prefill", "leave"),
]
SLEPT = [
    case("decode", f"sleep {machines} {seconds}")
    for machines in ("daemon 1", "daemon 0", "gateway", "coordinator daemon 1", "nodes", "all")
    for seconds in (20, 100)
]
"""Lids that are closed and opened, within the limits by which things are given up and beyond them."""
RENEWED = [Case("decode", ("wait 330",), certificates=300)]
USURPED = [Case("decode", (f"usurp {part} 8",), standby=True) for part in ("coordinator", "standby")]
LOADING = [
    *(case("load", f"kill {part}") for part in PARTS),
    *(case("load", f"stop {part} 8") for part in ("engine 0", "daemon 1", "gateway", "coordinator")),
    case("load", "cut daemon 1 both 8"),
    case("load", "cut coordinator both 8"),
    case("load", "sleep nodes 45"),
    case("load", "sleep all 40"),
    Case("load", ("usurp coordinator 8",), standby=True),
]
HELPED = [case("prefill", "kill template 0"), case("prefill", "stop template 0 60")]
"""A helper process of the head, which chats need. The next one is asked."""

CASES = [
    *KILLED,
    *HELPED,
    *STOPPED,
    *BATTERED,
    *FROZEN,
    *TWICE,
    *GONE,
    *SCARCE,
    *NETWORK,
    *DISK,
    *CACHE,
    *CLOCK,
    *STARTS,
    *SLEPT,
    *RENEWED,
    *USURPED,
    *LOADING,
]
SHORT = [
    case("decode", "kill engine 0"),
    case("prefill", "kill engine 2"),
    case("decode", "kill carrier 1"),
    case("decode", "kill daemon 0"),
    case("decode", "stop engine 0 120"),
    case("decode", "stop carrier 2 120"),
    case("decode", "stop daemon 1 120"),
]
"""Cases of the test suite; `tests/integration/faults/test_killed.py` says which of them every run has. A
stopped process is woken as soon as the ring is known to be down."""
