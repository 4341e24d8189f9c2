"""Which ring gets a request, where there are many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway import rings as module
from gateway.answer import Answer
from gateway.metrics import Metrics
from gateway.rings import SAMPLE, Rings
from gateway.scheduler import Request
from gateway.timings import Timings
from mesh.errors import FailedPrecondition, NotFound, Unavailable
from sealring.v1 import inference_pb2 as inference


class FakeRing:
    """As gateway.ring.Ring, as far as requests are given to it; counts who asks how busy it is."""

    looked_at = 0

    def __init__(self, name: str, deployment: str, **_: Any) -> None:
        self.name, self.deployment = name, deployment
        self.attached, self.patient = True, True
        self.serving = SimpleNamespace(max_rows=4)
        self.requests: list[str] = []
        self.waiting: list[tuple[Request, Answer, int]] = []
        self.scheduler = self

    def load(self) -> SimpleNamespace:
        FakeRing.looked_at += 1
        return SimpleNamespace(waiting=0, running=len(self.requests), kv_usage=0.0)

    def kept(self) -> tuple[int, int]:
        return 0, 0

    def submit(self, request: Request, answer: Answer, min_trust: int) -> None:
        self.requests.append(request.id)

    def leave(self) -> None: ...

    def take_waiting(self) -> list[tuple[Request, Answer, int]]:
        taken, self.waiting = self.waiting, []
        return taken


def make(monkeypatch: pytest.MonkeyPatch, count: int, trust: int = 10) -> tuple[Rings, list[FakeRing]]:
    monkeypatch.setattr(module, "Ring", FakeRing)
    rings = Rings(None, None, queue_limit=9, metrics=Metrics(), signed_roster=lambda: (b"", b""))  # type: ignore[arg-type]
    names = [f"ring-{number}" for number in range(count)]
    roster = SimpleNamespace(
        rings=[SimpleNamespace(id=name, deployment="model", min_trust=trust) for name in names], members=[]
    )
    rings.use_roster(roster)  # type: ignore[arg-type]
    return rings, [rings._rings[name] for name in names]  # type: ignore[misc]


def ask(
    rings: Rings, number: int, *, ring: str = "", min_trust: int = 0, model: str = "model", key: bytes = b""
) -> None:
    envelope = inference.Envelope(sealed_for=inference.SealedFor(ring=ring) if ring else None)
    request = Request(f"r{number}", "key", 1, envelope, model, affinity=key)
    rings.submit(model, request, Answer(Timings()), min_trust=min_trust)


def test_of_few_rings_the_least_busy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, SAMPLE)
    for number in range(3 * SAMPLE):
        ask(rings, number)
    assert [len(ring.requests) for ring in made] == [3] * SAMPLE


def test_of_many_a_few_are_looked_at_and_load_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, 500)
    FakeRing.looked_at = 0
    for number in range(2000):
        ask(rings, number)
    assert FakeRing.looked_at <= 2000 * SAMPLE
    assert max(len(ring.requests) for ring in made) <= 6


def test_the_one_ring_that_is_up_or_trusted_is_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, 400)
    for ring in made[:-1]:
        ring.attached = False
    ask(rings, 1)
    assert made[-1].requests == ["r1"]
    rings._trust_of["ring-7"] = 20
    made[7].attached = True
    ask(rings, 2, min_trust=15)
    assert made[7].requests == ["r2"]
    with pytest.raises(FailedPrecondition, match="trust of 21"):
        ask(rings, 3, min_trust=21)
    made[-1].attached = made[7].attached = False
    for ring in made:
        ring.patient = False
    with pytest.raises(Unavailable, match="just now"):
        ask(rings, 4)


def test_a_sealed_prompt_goes_to_its_ring_and_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, 40)
    ask(rings, 1, ring="ring-33")
    assert made[33].requests == ["r1"]
    with pytest.raises(Unavailable):
        ask(rings, 2, ring="ring-41")
    with pytest.raises(NotFound):
        ask(rings, 3, model="other")


def where(made: list[FakeRing], number: int) -> str:
    return next(ring.name for ring in made if f"r{number}" in ring.requests)


def counted(rings: Rings, name: str) -> float:
    return rings._metrics.registry.get_sample_value(f"sealring_{name}_total", {"model_name": "model"}) or 0.0


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.mark.parametrize("count", [2, 5, 60])
def test_requests_of_one_key_go_to_one_ring(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    rings, made = make(monkeypatch, count)
    homes = set()
    for number in range(40):
        ask(rings, 2 * number, key=key_of(number))
        ask(rings, 2 * number + 1, key=key_of(number))
        assert where(made, 2 * number) == where(made, 2 * number + 1)
        homes.add(where(made, 2 * number))
        for ring in made:
            ring.requests.clear()
    assert len(homes) >= min(count, 20)
    assert (counted(rings, "requests_routed_by_key"), counted(rings, "routed_by_key_moved")) == (80, 0)


def test_everything_under_one_key_overloads_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, 4)
    for number in range(64):
        ask(rings, number, key=key_of(1))
    assert max(len(ring.requests) for ring in made) <= 64 / 4 + 1
    assert min(len(ring.requests) for ring in made) >= 64 / 4 - 1
    assert counted(rings, "routed_by_key_moved") >= 64 / 4 * 3 - 1


def test_a_ring_that_leaves_gives_up_its_keys_and_what_waits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others move; when it is back, its keys are, too."""
    rings, made = make(monkeypatch, 3)

    def homes() -> list[str]:
        found = []
        for number in range(60):
            ask(rings, number, key=key_of(number))
            found.append(where(made, number))
            for ring in made:
                ring.requests.clear()
        return found

    before = homes()
    gone = made[0]
    own = [number for number in range(60) if before[number] == gone.name]
    gone.attached = False
    envelope = inference.Envelope()
    gone.waiting = [
        (Request(f"r{number}", "key", 1, envelope, "model", affinity=key_of(number)), Answer(Timings()), 0)
        for number in own[:2]
    ]
    rings._lost(gone)  # type: ignore[arg-type]
    taken = [where(made, number) for number in own[:2]]
    for ring in made:
        ring.requests.clear()
    during = homes()
    assert [number for number in range(60) if before[number] != during[number]] == own
    assert {during[number] for number in own} == {made[1].name, made[2].name}
    assert [during[number] for number in own[:2]] == taken
    gone.attached = True
    assert homes() == before


def test_a_key_goes_to_no_ring_that_is_trusted_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, 3)
    rings._trust_of["ring-2"] = 20
    for number in range(12):
        ask(rings, number, key=key_of(number), min_trust=15)
    assert [len(ring.requests) for ring in made] == [0, 0, 12]
    with pytest.raises(FailedPrecondition):
        ask(rings, 99, key=key_of(1), min_trust=21)


def test_a_sealed_prompts_ring_is_the_clients_choice_whatever_key_stands_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rings, made = make(monkeypatch, 4)
    for number in range(8):
        ask(rings, number, key=key_of(number), ring="ring-3")
    assert len(made[3].requests) == 8


def test_a_key_looks_at_few_of_many_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, made = make(monkeypatch, 500)
    FakeRing.looked_at = 0
    for number in range(200):
        ask(rings, number, key=key_of(number % 20))
    assert FakeRing.looked_at <= 200 * SAMPLE
    assert max(len(ring.requests) for ring in made) <= 3
