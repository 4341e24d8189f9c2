"""What `bench prefix` makes of rounds, also of those in which nothing was answered."""

import asyncio
import json

import pytest

from bench import prefix
from bench.frame import new_figure
from bench.openai_client import Reply, get_metrics
from bench.verdict import MISSED, OPEN


def round_of(later, computed, failed=0, moved=0):
    return {
        "failed": failed,
        "ttft_first_ms": {"p50": 9.0} if later else {"count": 0},
        "ttft_later_ms": {"p50": later, "p95": later} if later else {"count": 0},
        "prompt_tokens": 100,
        "computed_tokens": computed,
        "hit_rate": 0.5,
        "tokens_per_second": 8.0,
        "kept_mib": 1.5,
        "moved": moved,
    }


def result_of(on, off, by_prefix, by_load):
    return {
        "model": "m",
        "conversations": {"cached": 2, "routed": 4},
        "turns": 3,
        "stages": {"1": {"on": on, "off": off}},
        "rings": {"count": 2, "rounds": {"by prefix": by_prefix, "by load": by_load}},
    }


def test_ratios_are_medians_over_rounds_that_belong_together():
    on, off = [round_of(2.0, 10), round_of(9.0, 10)], [round_of(8.0, 100), round_of(10.0, 100)]
    by_prefix, by_load = [round_of(1.0, 30, moved=3)] * 2, [round_of(1.0, 60)] * 2
    result = result_of(on, off, by_prefix, by_load)
    rounds = [check.rounds for check in prefix.checks(result)]
    assert rounds == [[0.25, 0.9], [1.0, 1.0], [0.5, 0.5], [0, 0]]
    assert prefix.ratio(result["stages"]["1"], "on", "off", "ttft_later_ms", "p50") == 0.575
    cached, routed = prefix.tables(result)
    assert [row[0] for row in cached.rows] == ["1 stage, on", "1 stage, off"]
    assert [row[-1] for row in routed.rows] == [6, 0]
    assert all(len(row) == len(table.columns) for table in (cached, routed) for row in table.rows)


def test_a_round_without_answers_misses_the_targets_and_breaks_nothing():
    dead = [round_of(0, 0, failed=2)]
    result = result_of(dead, dead, dead, dead)
    assert [check.verdict for check in prefix.checks(result)] == [OPEN, OPEN, OPEN, MISSED]
    assert prefix.tables(result)


def test_one_ring_has_no_second_part():
    result = result_of([round_of(2.0, 10)], [round_of(4.0, 20)], [], [])
    result["rings"]["rounds"] = {}
    assert len(prefix.tables(result)) == 1


@pytest.mark.parametrize("stages", [[], [round_of(2.0, 10)], [round_of(0, 0, failed=2)]])
def test_every_result_has_a_chart(stages):
    pytest.importorskip("matplotlib")
    result = result_of(stages, stages, stages, stages)
    if not stages:
        result["rings"]["rounds"], result["stages"] = (
            {},
            {"1": {"on": [round_of(2.0, 9)], "off": [round_of(4.0, 9)]}},
        )
    prefix.chart(result, new_figure())


def reply(begun, arrivals, prompt, cached, error=""):
    return Reply(begun, arrivals, "x", prompt, len(arrivals), cached_tokens=cached, error=error)


def test_first_and_later_turns_are_told_apart():
    turns = [
        [reply(0.0, [1.0], 100, 0), reply(2.0, [2.25, 2.5], 150, 64), reply(3.0, [], 0, 0, "timeout")],
        [reply(0.0, [], 0, 0, "status 503")],
    ]
    change = {"prefix_cache_queries": 250.0, "prefix_cache_hits": 64.0, "routed_by_key_moved": 1.0}
    told = prefix._told(turns, 2.0, change, {"prefix_cache_bytes": float(3 << 20)})
    assert (told["ttft_first_ms"]["p50"], told["ttft_later_ms"]["p50"]) == (1000.0, 250.0)
    assert (told["prompt_tokens"], told["computed_tokens"], told["failed"]) == (250, 186, 2)
    assert (told["hit_rate"], told["tokens_per_second"], told["kept_mib"], told["moved"]) == (
        0.256,
        1.5,
        3.0,
        1,
    )
    json.dumps(told)


async def test_metrics_of_one_model_are_read():
    body = (
        b"# HELP sealring_steps_total steps\n"
        b'sealring_steps_total{model_name="bench"} 3.0\n'
        b'sealring_steps_total{model_name="other"} 4.0\n'
        b'sealring_prefix_cache_bytes{model_name="bench"} 1e+06\n'
        b'sealring_request_success_total{finished_reason="stop",model_name="bench"} 5.0\n'
    )

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        told = await get_metrics(f"http://127.0.0.1:{port}", "bench")
    assert told == {"steps": 3.0, "prefix_cache_bytes": 1e6}
