"""The lists of requests, and what counts of the answers to them."""

from __future__ import annotations

import argparse

import pytest

from bench import mixed
from bench.openai_client import Reply


@pytest.mark.parametrize("name", mixed.LISTS)
def test_a_list_follows_from_its_seed_and_keeps_to_its_limits(name: str) -> None:
    asked = mixed.requests(name, 200, 7)
    assert asked == mixed.requests(name, 200, 7)
    assert not {text for text, _ in asked[:20]} & {text for text, _ in mixed.requests(name, 20, 8)}
    words, tokens = mixed.LISTS[name]
    lengths = sorted(len(text.split()) for text, _ in asked)
    assert words.least <= lengths[0] < words.median < lengths[-1] <= words.most
    assert all(tokens.least <= each <= tokens.most for _, each in asked)


def reply(begun: float, *arrivals: float) -> Reply:
    return Reply(
        begun, list(arrivals), prompt_tokens=100, completion_tokens=len(arrivals), ended=arrivals[-1]
    )


RATES = {"prefill": 100.0, "2": 10.0}


def test_a_closed_loop_counts_until_its_last_request_is_sent() -> None:
    replies = [
        reply(0.0, 1.0, 2.0),
        reply(0.0, 1.5, 3.0, 4.0, 5.0),
        reply(2.0, 3.5, 4.0),
        reply(4.0, 4.5, 9.0),
    ]
    found = mixed.figures(replies, 2, RATES)
    assert (found["seconds"], found["prompt_tokens"], found["tokens"]) == (4.0, 300, 7)
    assert found["efficiency"] == pytest.approx((300 / 100 + 7 / 10) / 4.0, abs=1e-3)


def test_processors_time_counts_of_the_whole_load() -> None:
    replies = [reply(0.0, 1.0, 2.0), reply(0.0, 1.5, 3.0, 4.0, 5.0), reply(2.0, 3.5, 4.0)]
    rates = RATES | {"cpu prefill": 0.01, "cpu 2": 0.25}
    found = mixed.figures(replies, 2, rates, {"engine": 7.0, "gateway": 1.0})
    assert found["cpu_efficiency"] == pytest.approx((300 * 0.01 + 8 * 0.25) / 8.0, abs=1e-3)
    assert found["cpu_ms_per_token"] == pytest.approx(8000 / 308, abs=1e-3)
    assert "cpu_efficiency" not in mixed.figures(replies, 2, {}, {"all": 8.0})


def test_an_open_loop_counts_until_its_last_answer_and_has_no_efficiency() -> None:
    found = mixed.figures([reply(0.0, 1.0, 2.0), Reply(0.0, error="timeout", ended=5.0)], 0, RATES)
    assert (found["seconds"], found["tokens"], found["failed"]) == (5.0, 2, 1)
    assert "efficiency" not in found


def test_a_result_has_tables_and_checks() -> None:
    replies = [reply(0.0, 1.0, 2.0), reply(0.0, 1.5, 3.0), reply(2.0, 3.5, 4.0)]
    ours = mixed.figures(replies, 2, RATES, {"engine": 3.0, "gateway": 1.0})
    ours |= {"shares": {"compute": 50.0, "idle": 10.0}}
    theirs = mixed.figures(replies, 2, {}, {"all": 4.0}) | {"shares": {}}
    options = {"list": "mixed", "model": "2x64", "gpus": 0}
    rounds = {"2 at a time": {mixed.OURS: [ours], mixed.ALONE: [theirs], mixed.SERVER: [theirs]}}
    result = {"options": options, "rounds": rounds}
    assert [one.rounds[0] for one in mixed.checks(result)][2:] == [1.0, 1.0, 0]
    by_time = [one | {"cpu_efficiency": 0.8} for one in (ours, ours)]
    measured = result | {"rounds": {"2 at a time": {mixed.OURS: by_time}}}
    assert mixed.checks(measured)[1].rounds == [0.8, 0.8]
    on_gpus = mixed.checks(result | {"options": options | {"gpus": 2}})
    assert [one.name for one in on_gpus] == [f"{one.name} (GPU)" for one in mixed.checks(result)]
    systems, shares, spent = mixed.tables(result)
    assert [len(row) for row in systems.rows] == [len(systems.columns)] * 3
    assert [len(row) for row in shares.rows] == [len(shares.columns)]
    assert (spent.columns, spent.rows) == (["load", "engine", "gateway"], [["2 at a time", 3.0, 1.0]])


def test_a_closed_loop_sends_requests_while_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    mixed.options(parser)
    assert parser.parse_args(["--each", "2"]).each == 2
    with pytest.raises(SystemExit):
        parser.parse_args(["--each", "1"])
    assert "needs 2 requests" in capsys.readouterr().err
