"""What `python -m bench macs` says of its figures, and when it refuses them."""

from __future__ import annotations

import argparse
from contextlib import asynccontextmanager

import pytest

from bench import macs
from bench.openai_client import Reply
from bench.paced import restart
from bench.paced.clusters import Cost
from bench.paced.figures import figures
from bench.verdict import MISSED
from sealring.mesh.errors import FailedPrecondition, Unavailable


def load(rows: int, rate: float, arithmetic: float) -> dict[str, object]:
    return {
        "load": f"{rows} rows",
        "tokens_per_second": rate,
        "arithmetic": arithmetic,
        "own_share": 0.1,
        "late_ms": 0.2,
        "machine_load": 1.0,
    }


BOTH = {"cluster": "2xm4max", "model": "llama-70b-4bit"}


def result(alone: float = 39.0, name: str = "static") -> dict[str, object]:
    parser = argparse.ArgumentParser()
    macs.options(parser)
    parts = {"p50": 1.0, "p95": 2.0}
    chat = load(4, 20.0, 0) | {"prompt_per_second": 9.0, "cached": 0, "failed": 0}
    chat |= {"turns": [{"ttft_ms": {"p50": 1.0, "max": 2.0}, "new": 30}], "computed_again": 0.01}
    runs = [
        {"macs": 2, "loads": [load(8, 71.0, 72.0)], "faults": {"carrier": 1.0}} | BOTH,
        {"macs": 1, "loads": [load(8, alone, 39.06)]} | BOTH | {"cluster": "m4max"},
    ]
    if name != "static":
        runs = [{"macs": 2, "loads": [chat | {"ttft_ms": parts, "gap_ms": parts}]} | BOTH]
    given = vars(parser.parse_args(["--list", name]))
    section = {"options": given, "network": "loopback", "published": [], "runs": runs}
    return {"what": macs.SIMULATED, "options": given, "sections": [section]}


@pytest.mark.parametrize("name", ["static", "chat", "agents"])
def test_every_table_and_target_says_that_it_is_simulated(name):
    shown = macs.tables(result(name=name))
    assert shown
    assert all(macs.SIMULATED in one.title.lower() for one in shown)
    assert all(len(row) == len(one.columns) for one in shown for row in one.rows)
    assert all(macs.SIMULATED in one.name for one in macs.checks(result(name=name)))


def test_rates_are_compared_with_one_mac_at_as_many_rows():
    table, _ = macs.tables(result())
    assert [row[table.columns.index("times one")] for row in table.rows] == [pytest.approx(71 / 39), 1.0]


def test_one_mac_that_is_not_as_fast_as_its_figures_misses():
    missed = {one.name for one in macs.checks(result(alone=33.0)) if one.verdict == MISSED}
    assert len(missed) == 1
    assert "against its figures" in missed.pop()


def test_a_run_whose_own_work_takes_half_of_the_paced_time_refuses_itself():
    before = Cost(2.0, 1.0, 1.0, 4)
    assert macs.honest(lambda: Cost(12.0, 4.0, 2.0, 14), before)["own_share"] == 0.4
    with pytest.raises(FailedPrecondition) as caught:
        macs.honest(lambda: Cost(12.0, 4.0, 3.5, 14), before)
    assert caught.value.reason == "PACE_TOO_FAST"


def test_two_macs_double_a_rate_only_where_their_lanes_are_not_wasted():
    ratios = {
        rows: macs.arithmetic("2xm4max", "llama-70b-4bit", "tb5", rows)
        / macs.arithmetic("m4max", "llama-70b-4bit", "tb5", rows)
        for rows in (1, 8, 16, 32, 64)
    }
    assert 0.9 < ratios[1] < 1
    assert ratios[8] > 1.8 > 1.6 > ratios[16] > 1.4
    assert ratios[32] == pytest.approx(1.0, rel=0.02)
    assert ratios[64] > 1.8


def test_what_others_published_stands_beside_one_request_alone():
    shown = result()
    (section,) = shown["sections"]
    section["published"] = [
        BOTH | {"tokens_per_second": 10.5, "alone": 11.0},
        BOTH | {"tokens_per_second": 60.0, "rows": 8},
    ]
    one, many = load(1, 10.8, 11.4), load(8, 71.0, 72.0)
    section["runs"] = [{"macs": 2, "loads": [one, many]} | BOTH]
    (table,) = macs.tables(shown)
    place = table.columns.index("published")
    assert [row[place] for row in table.rows] == [10.5, 60.0]


def test_every_target_of_the_data_file_has_options_that_are_known():
    for name, target in figures().targets.items():
        parser = argparse.ArgumentParser()
        macs.options(parser)
        given = parser.parse_args(target["arguments"].split())
        assert given.model in figures().models, name
        assert target["wanted"]


async def test_after_a_restart_prompts_come_from_the_disks():
    parser = argparse.ArgumentParser()
    macs.options(parser)
    asked = ["--list", "restart", "--cluster", "2xm3ultra", "--model", "llama-8b-4bit", "--at-once", "1"]
    found = await macs.run(parser.parse_args([*asked, "--turns", "4"]))
    (check,) = macs.checks(found)
    assert 0.0 < (check.worst or 0.0) < restart.COLD
    (load,) = found["sections"][0]["runs"][0]["loads"]
    assert load["after_restart"] < 0.01
    again = load["turns"][2]
    assert 10 * again["disks"]["new"] < again["without"]["new"]
    shown = macs.tables(found)
    assert all(macs.SIMULATED in one.title.lower() for one in shown)
    assert all(len(row) == len(one.columns) for one in shown for row in one.rows)


async def test_no_restart_is_simulated_of_states_whose_bytes_are_unknown():
    parser = argparse.ArgumentParser()
    macs.options(parser)
    with pytest.raises(FailedPrecondition) as caught:
        await macs.run(parser.parse_args(["--list", "restart", "--model", "qwen35-9b-4bit"]))
    assert caught.value.reason == "NO_STATE_SIZES"


async def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    @asynccontextmanager
    async def none(machines, *_):
        raise Unavailable("no node came", reason="NODES_NOT_ONLINE")
        yield

    monkeypatch.setattr(macs, "macs", none)
    parser = argparse.ArgumentParser()
    macs.options(parser)
    found = await macs.run(parser.parse_args(["--all", "--parts", "glm,qwen"]))
    assert [(one["name"], one["failed"][:12]) for one in found["sections"]] == [
        ("glm", "no node came"),
        ("qwen", "no node came"),
    ]
    assert len(macs.tables(found)[-1].rows) == 2


def test_new_tokens_alone_take_what_stages_share_and_what_they_look_back_at():
    def seconds(text: str, cached: int = 0) -> float:
        reply = Reply(0.0, prompt_tokens=20_000 + cached, cached_tokens=cached)
        return macs.new_alone(text, "llama-8b-4bit", "tb5", reply).whole

    assert 1.7 < seconds("m3ultra") / seconds("2xm3ultra") < 2.0
    assert seconds("m3ultra", 20_000) > 1.3 * seconds("m3ultra")
