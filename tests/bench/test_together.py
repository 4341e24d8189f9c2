"""What the rounds of rings on one device, of mlx-lm and of stored prefixes say."""

from __future__ import annotations

from typing import Any

from bench import stored, together
from bench.verdict import MET, MISSED


def test_each_round_of_two_stages_is_held_against_the_same_round_of_others() -> None:
    def loads(mixed: list[float], steady: list[float]) -> dict[str, Any]:
        return {
            "one request": [{"token_ms": 1.0} for _ in mixed],
            "full rows": [{"tokens_per_second": 1.0, "steady": rate} for rate in steady],
            "mixed": [{"tokens_per_second": rate} for rate in mixed],
        }

    result = {
        "options": {"rows": 8, "model": "x", "gpus": 1},
        "rounds": {
            "two": loads([30.0, 44.0, 24.0], [95.0, 96.0, 97.0]),
            "one": loads([1.0, 1.0, 1.0], [100.0, 100.0, 100.0]),
            "alone": loads([10.0, 20.0, 10.0], [1.0, 1.0, 1.0]),
        },
    }
    mixed, static = together.checks(result)
    assert (mixed.rounds, mixed.verdict) == ([3.0, 2.2, 2.4], MET)
    assert (static.rounds, static.verdict) == ([0.95, 0.96, 0.97], MET)
    del result["rounds"]["alone"]
    assert [one.name for one in together.checks(result)] == [static.name]
    assert [len(row) for row in together.tables(result)[0].rows] == [5, 5]


def test_first_tokens_are_held_against_cold_ones_and_rates_against_a_ring_that_writes_nothing() -> None:
    prompt = {
        "tokens": 9,
        "cold_s": 10.0,
        "memory_s": 0.8,
        "disk_s": 1.5,
        "memory_cached": 8,
        "disk_cached": 7,
    }
    rate = {"writing": 99.0, "not writing": 100.0, "written_mib": 3.0}
    rate |= {"writing_cpu_ms": 5.0, "not writing_cpu_ms": 4.0}
    result = {"prompts": [prompt] * 3, "rates": [rate] * 3}
    disk, memory, writing, cpu = stored.checks(result)
    assert (disk.worst, disk.verdict) == (0.15, MET)
    assert (memory.worst, memory.verdict) == (0.08, MISSED)
    assert (writing.worst, writing.verdict) == (0.99, MET)
    assert (cpu.worst, cpu.verdict) == (0.8, MISSED)
    assert stored.tables(result)[0].rows[0] == [9, 10.0, 0.8, 1.5, 8, 7]
