"""What the dashboard makes of a gateway's metrics and a coordinator's answers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.dashboard import look
from sealring.gateway.metrics import Metrics, ModelLoad
from sealring.mesh.errors import FailedPrecondition
from sealring.v1 import admin_pb2

BOUNDS = [(0.1, 1.0), (1.0, 3.0), (math.inf, 4.0)]


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ([], None),
        ([(0.1, 0.0), (math.inf, 0.0)], None),
        (BOUNDS, 1.0),
        ([(0.1, 2.0), *BOUNDS[1:]], 0.1),
        ([(0.1, 1.0), (math.inf, 9.0)], None),
    ],
)
def test_the_median_is_its_buckets_bound(buckets: list[tuple[float, float]], expected: float | None) -> None:
    assert look.median(buckets) == expected


async def test_the_load_is_of_the_last_minute() -> None:
    metrics = Metrics()
    metrics.watch(lambda: {"demo": ModelLoad(1, 2, 0.5, 30, 4000)})

    async def exposition() -> str:
        return metrics.exposition().decode()

    def answered(tokens: int, seconds: float) -> None:
        metrics.generation_tokens.labels("demo").inc(tokens)
        metrics.first_token.labels("demo").observe(seconds)
        metrics.prefix_queries.labels("demo").inc(10)
        metrics.prefix_hits.labels("demo").inc(tokens)

    load = look.Load(exposition)
    answered(7, 9.0)  # before anybody looked
    (first,) = await load.look(100.0)
    assert first == {
        "model": "demo",
        "waiting": 1.0,
        "running": 2.0,
        "kv_usage": 0.5,
        "prefix_tokens": 30.0,
        "prefix_bytes": 4000.0,
        "tokens_per_second": None,
        "first_token": None,
        "prefix_share": None,
    }
    answered(5, 0.04)
    (second,) = await load.look(110.0)
    assert second["tokens_per_second"] == 0.5
    assert (second["first_token"], second["prefix_share"]) == (0.05, 0.5)
    (third,) = await load.look(165.0)  # the first is too long ago, the second is not
    assert (third["tokens_per_second"], third["first_token"]) == (0.0, None)


async def test_a_gateway_that_began_anew_counts_from_nothing() -> None:
    told = ["9", "2"]
    text = 'sealring_generation_tokens_total{{model_name="m"}} {}\n'
    gauge = 'sealring_num_requests_running{model_name="m"} 1\n'

    async def exposition() -> str:
        return text.format(told.pop(0)) + gauge

    load = look.Load(exposition)
    await load.look(0.0)
    (found,) = await load.look(4.0)
    assert found["tokens_per_second"] == 0.5


async def test_an_audit_log_that_does_not_hold_is_shown_with_why(monkeypatch: pytest.MonkeyPatch) -> None:
    page = admin_pb2.ListAuditLogResponse(
        entries=[admin_pb2.AuditEntry(sequence=one, action="enrol") for one in (1, 2)]
    )

    class Admin:
        async def call(self, method: str, **fields: Any) -> Any:
            assert (method, fields) == ("ListAuditLog", {"limit": 50, "newest": True})
            return page

    async def verify(admin: Any, pin: bytes) -> Any:
        raise FailedPrecondition("entry 2 was changed", reason="AUDIT_BROKEN")

    admin: Any = Admin()
    monkeypatch.setattr(look, "verify_audit", verify)
    found = await look.audit(admin, b"")
    assert [one["sequence"] for one in found["entries"]] == [2, 1]
    assert "entry 2 was changed" in found["trouble"]

    async def holds(admin: Any, pin: bytes) -> Any:
        return 2, b"hash", SimpleNamespace(sequence=1, at=5)

    monkeypatch.setattr(look, "verify_audit", holds)
    found = await look.audit(admin, b"")
    assert (found["trouble"], found["count"], found["signed"], found["signed_at"]) == ("", 2, 1, 5)


async def test_a_member_without_a_trace_says_why() -> None:
    found = admin_pb2.TraceRingResponse(duration=1000)
    found.members.add(rank=0, name="a")
    silent = found.members.add(rank=1, name="b")
    silent.problem.message = "it does not answer"

    class Admin:
        async def call(self, method: str, **fields: Any) -> Any:
            return found

    admin: Any = Admin()
    first, second = await look.trace(admin, "ring")
    assert (first["idle"], first["compute"]) == (100.0, 0.0)
    assert (second["name"], "it does not answer" in second["trouble"]) == ("b", True)
