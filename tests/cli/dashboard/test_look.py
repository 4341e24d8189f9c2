"""What the dashboard makes of a gateway's metrics and a coordinator's answers."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.dashboard import look
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.edge.metrics import Metrics, ModelLoad
from sealring.mesh.errors import RosterError, Unavailable
from sealring.testing import PaperCluster
from sealring.v1 import admin_pb2

NOW = 1_800_000_000
BOUNDS = [(0.1, 1.0), (1.0, 3.0), (math.inf, 4.0)]


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ([], None),
        ([(0.1, 0.0), (math.inf, 0.0)], None),
        (BOUNDS, 1.0),
        ([(0.1, 2.0), *BOUNDS[1:]], 0.1),
        ([(0.1, 2.0), (1.0, 4.0), (math.inf, 5.0)], 1.0),
        ([(0.1, 1.0), (math.inf, 1.0)], 0.1),
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
        metrics.prefix_from_disk.labels("demo").inc(tokens - 3)

    load = look.GatewayLoad("gateway:1", exposition)
    answered(7, 9.0)  # before anybody looked
    (first,) = await load.look(100.0)
    assert first == {
        "gateway": "gateway:1",
        "model": "demo",
        "waiting": 1.0,
        "running": 2.0,
        "kv_usage": 0.5,
        "prefix_tokens": 30.0,
        "prefix_bytes": 4000.0,
        "tokens_per_second": None,
        "first_token": None,
        "prefix_share": None,
        "disk_share": None,
    }
    answered(5, 0.04)
    (second,) = await load.look(110.0)
    assert second["tokens_per_second"] == 0.5
    assert (second["first_token"], second["prefix_share"], second["disk_share"]) == (0.05, 0.5, 0.2)
    (third,) = await load.look(165.0)  # the first is too long ago, the second is not
    assert (third["tokens_per_second"], third["first_token"]) == (0.0, None)


async def test_a_minute_ago_counts_still_and_every_model_for_itself() -> None:
    told = [{"a": 10, "b": 1}, {"a": 70, "b": 121}]

    async def exposition() -> str:
        found = told.pop(0)
        lines = [
            f'sealring_generation_tokens_total{{model_name="{name}"}} {count}'
            for name, count in found.items()
        ]
        lines += [f'sealring_num_requests_running{{model_name="{name}"}} 1' for name in found]
        bucket = "sealring_time_to_first_token_seconds_bucket"
        lines += [
            f'{bucket}{{model_name="{name}",le="{bound}"}} {count}'
            for name, count in found.items()
            for bound in (("0.5", "+Inf") if name == "a" else ("2.0", "+Inf"))
        ]
        return "\n".join(lines) + "\n"

    load = look.GatewayLoad("gateway:1", exposition)
    await load.look(100.0)
    found = await load.look(160.0)
    assert [(one["model"], one["tokens_per_second"], one["first_token"]) for one in found] == [
        ("a", 1.0, 0.5),
        ("b", 2.0, 2.0),
    ]


async def test_a_cluster_is_told_with_what_its_verified_roster_says() -> None:
    paper = PaperCluster()
    first = paper.roster.members[0]
    answer = SimpleNamespace(root_metadata=paper.root_chain, roster=paper.envelope)

    class Admin:
        address = "h:1"

        async def call(self, method: str) -> Any:
            if method == "GetRoster":
                return answer
            if method == "ListDeployments":
                return admin_pb2.ListDeploymentsResponse()
            nodes = [admin_pb2.Node(id=one, name=one, trust=10) for one in (first.id, "stranger")]
            return admin_pb2.ListNodesResponse(nodes=nodes)

    admin: Any = Admin()
    now = float(paper.roster.issued)
    found = await look.cluster(admin, bytes.fromhex(paper.pin), now)
    assert (found["now"], found["coordinator"], found["root"]) == (now, "h:1", paper.pin)
    assert (found["roster"]["version"], found["roster"]["hash"]) == (
        paper.roster.version,
        paper.roster.hash.hex(),
    )
    assert len(found["roster"]["signers"]) == 1
    told = [(one["listed"], one["attested_at"], one["challenged_at"]) for one in found["nodes"]]
    assert told == [(True, first.attested_at, first.challenged_at), (False, None, None)]
    with pytest.raises(RosterError):
        await look.cluster(admin, bytes(32), now)


async def test_a_gateway_that_does_not_answer_is_named_with_the_reason_until_it_does() -> None:
    answers: list[str | Unavailable] = [
        Unavailable("nobody answers", reason="UNAVAILABLE"),
        'sealring_num_requests_running{model_name="m"} 1\n',
    ]

    async def exposition() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    load = look.GatewayLoad("gateway:1", exposition)
    (silent,) = await load.look(0.0)
    assert silent.keys() == {"gateway", "trouble"}
    assert (silent["gateway"], "nobody answers" in silent["trouble"]) == ("gateway:1", True)
    (found,) = await load.look(4.0)
    assert (found["gateway"], found["model"], found["running"]) == ("gateway:1", "m", 1)


async def test_a_gateway_that_began_anew_counts_from_nothing() -> None:
    told = ["9", "2"]
    text = 'sealring_generation_tokens_total{{model_name="m"}} {}\n'
    gauge = 'sealring_num_requests_running{model_name="m"} 1\n'

    async def exposition() -> str:
        return text.format(told.pop(0)) + gauge

    load = look.GatewayLoad("gateway:1", exposition)
    await load.look(0.0)
    (found,) = await load.look(4.0)
    assert found["tokens_per_second"] == 0.5


async def test_the_audit_log_is_verified_once_and_then_what_is_new(tmp_path: Path) -> None:
    init(CoordinatorSettings(state_dir=tmp_path, cluster="demo"))
    with closing(Store.open(tmp_path)) as store:

        class Admin:
            def __init__(self) -> None:
                self.read = list[int]()

            async def call(self, method: str, after: int = 0, limit: int = 0, newest: bool = False) -> Any:
                assert method == "ListAuditLog"
                entries = store.audit.entries(after=after, limit=limit)
                self.read += [one.sequence for one in entries] * (not newest)
                return admin_pb2.ListAuditLogResponse(entries=entries)

        def write(count: int) -> None:
            for _ in range(count):
                store.audit.append(NOW, "operator", "do", "thing", {})

        admin: Any = Admin()
        audit = look.Audit(admin)
        write(60)
        for last, read in ((61, [*range(1, 62)]), (61, [61]), (63, [61, 62, 63])):
            found = await audit.look()
            assert (found["trouble"], found["count"]) == ("", last)
            assert [one["sequence"] for one in found["entries"]] == list(range(last, last - 50, -1))
            assert admin.read == read
            admin.read.clear()
            if read == [61]:
                write(2)
        with store.transaction() as connection:
            connection.execute("DELETE FROM messages WHERE kind = 'audit' AND key > 40")
        found = await audit.look()
        assert "audit log" in found["trouble"]
        assert [one["sequence"] for one in found["entries"]] == list(range(40, 0, -1))
