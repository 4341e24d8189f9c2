"""The load of gateways as the dashboard watches it: of the last seconds, and of the last 15 minutes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sealring.cli.dashboard import load as loads
from sealring.edge.metrics import Metrics, ModelLoad
from sealring.mesh.errors import Unavailable
from sealring.testing import ManualClock

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
    assert loads.median(buckets) == expected


async def test_the_load_is_of_the_last_seconds() -> None:
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

    load = loads.GatewayLoad("gateway:1", exposition)
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
    (third,) = await load.look(120.0)  # the first is too long ago, the second is not
    assert (third["tokens_per_second"], third["first_token"]) == (0.0, None)


async def test_a_quarter_of_a_minute_counts_and_every_model_for_itself() -> None:
    told = [{"a": 10, "b": 1}, {"a": 25, "b": 31}]

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

    load = loads.GatewayLoad("gateway:1", exposition)
    await load.look(100.0)
    found = await load.look(115.0)
    assert [(one["model"], one["tokens_per_second"], one["first_token"]) for one in found] == [
        ("a", 1.0, 0.5),
        ("b", 2.0, 2.0),
    ]


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

    load = loads.GatewayLoad("gateway:1", exposition)
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

    load = loads.GatewayLoad("gateway:1", exposition)
    await load.look(0.0)
    (found,) = await load.look(4.0)
    assert found["tokens_per_second"] == 0.5


async def test_a_quarter_of_an_hour_is_kept_summed_over_gateways() -> None:
    clock, told = ManualClock(0.0), {"tokens": 0}

    async def one() -> str:
        lines = ['sealring_num_requests_running{model_name="m"} 2']
        return "\n".join([*lines, f'sealring_generation_tokens_total{{model_name="m"}} {told["tokens"]}', ""])

    async def other() -> str:
        raise Unavailable("nobody answers")

    gateways = [loads.GatewayLoad("a", one), loads.GatewayLoad("b", one), loads.GatewayLoad("c", other)]
    history = loads.LoadHistory(gateways, clock=clock)
    for _ in range(400):
        await history.sample()
        clock.now += loads.SAMPLE_SECONDS
        told["tokens"] += 50
    found = await history.look()
    assert [one["gateway"] for one in found["gateways"]] == ["a", "b", "c"]
    assert found["gateways"][2]["trouble"]
    points = found["history"]["m"]
    assert points[-1] == [5.0, 20.0, 4.0, 0.0, None]
    assert points[0][0] == loads.KEPT_SECONDS + loads.SAMPLE_SECONDS
    assert len(points) == 181


async def test_few_models_are_kept_and_a_gap_where_nobody_answered() -> None:
    clock = ManualClock(0.0)
    answers: list[Any] = [30, Unavailable("gone"), 30]

    async def many() -> str:
        found = answers.pop(0)
        if isinstance(found, Unavailable):
            raise found
        return "".join(f'sealring_num_requests_running{{model_name="m{n:02}"}} 1\n' for n in range(found))

    history = loads.LoadHistory([loads.GatewayLoad("a", many)], clock=clock)
    for _ in range(3):
        await history.sample()
        clock.now += 5
    found = (await history.look())["history"]
    assert list(found) == [f"m{number:02}" for number in range(loads.MOST_MODELS)]
    assert [point[0] for point in found["m00"]] == [15.0, 5.0]
