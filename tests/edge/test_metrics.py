"""What is counted of requests. People build dashboards on the names."""

from __future__ import annotations

import pytest

from sealring.edge import metrics as module
from sealring.edge.metrics import Metrics, ModelLoad
from sealring.mesh.errors import Cancelled, Unavailable
from sealring.testing import ManualClock
from sealring.v1 import inference_pb2 as inference

TIMED = (
    "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_prompt_tokens request_generation_tokens"
)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"sealring_{name}", {"model_name": "demo", **labels})
    return found or 0.0


def delta(tokens: int, choice: int = 0) -> inference.GenerateResponse:
    return inference.GenerateResponse(delta=inference.Delta(tokens=tokens, choice=choice))


def test_an_answer_is_timed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, metrics = ManualClock(100.0), Metrics()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    with metrics.request("demo") as request:
        request.event(inference.GenerateResponse(started=inference.Started(prompt_tokens=7)))
        clock.now = 100.5
        request.event(delta(1))
        clock.now = 100.7
        request.event(delta(9, choice=1))
        clock.now = 100.8
        request.event(delta(4))
        request.event(delta(4))
        assert value(metrics, "generation_tokens_total") == 0
        clock.now = 101.4
        request.event(delta(16))
        assert value(metrics, "generation_tokens_total") == 16
        request.event(delta(17))
        assert value(metrics, "generation_tokens_total") == 16
        clock.now = 103.0
        done = inference.Finished(reason=inference.FINISH_REASON_LENGTH, completion_tokens=20)
        request.event(inference.GenerateResponse(finished=done))
    sums = {
        "time_to_first_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.1 + 0.05 + 0.0,
        "e2e_request_latency_seconds": 3.0,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 20,
    }
    assert {name: value(metrics, f"{name}_sum") for name in sums} == pytest.approx(sums)
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "generation_tokens_total") == 20
    assert value(metrics, "request_success_total", finished_reason="length") == 1


def test_a_request_counts_once_however_it_ends() -> None:
    metrics = Metrics()
    with metrics.request("demo") as request:
        request.event(delta(3))
    with pytest.raises(Cancelled), metrics.request("demo"):
        raise Cancelled("the client left")
    with pytest.raises(Unavailable), metrics.request("demo"):
        raise Unavailable("no ring")
    assert value(metrics, "request_success_total", finished_reason="abort") == 2
    assert value(metrics, "request_success_total", finished_reason="") == 0
    assert value(metrics, "request_refused_total", code=Unavailable("x").code) == 1
    assert value(metrics, "generation_tokens_total") == 3


def test_dashboards_find_what_they_look_for() -> None:
    metrics = Metrics()
    metrics.watch(lambda: {"demo": ModelLoad(1, 2, 0.25, 3, 4)})
    with metrics.request("demo") as request:
        request.event(inference.GenerateResponse(started=inference.Started(prompt_tokens=7)))
        request.event(delta(1), 0.5)
        request.event(delta(2), 0.5)
        request.event(inference.GenerateResponse(finished=inference.Finished(completion_tokens=2)))
    text = metrics.exposition().decode()
    for name in TIMED.split():
        assert f"sealring_{name}_bucket{{" in text
    gauges = {
        "num_requests_waiting": 1,
        "num_requests_running": 2,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_tokens": 3,
        "prefix_cache_bytes": 4,
    }
    assert {name: value(metrics, name) for name in gauges} == gauges
