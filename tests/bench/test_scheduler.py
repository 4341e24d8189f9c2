"""The scheduler is timed under the load that is asked for, and Macs in virtual time are what they are."""

from functools import partial

import pytest

from bench import macs, scheduler
from bench.frame import find, parse
from bench.paced import virtual
from bench.paced.disk import DiskTime
from sealring.v1 import control_pb2 as control


def test_as_many_run_and_wait_as_are_asked_for():
    found = scheduler.measure(2, 32, 50, 900)  # longer than answers
    assert found["rows_per_step_mean"] > 8
    assert found["microseconds_p50"] > 0


def test_rows_on_virtual_macs_make_what_arithmetic_says():
    for rows in (1, 8):
        found = virtual.static("2xm4max", "qwen38-27b-4bit", rows, steps=40)
        by_figures = macs.arithmetic("2xm4max", "qwen38-27b-4bit", "tb5", rows)
        assert found["tokens_per_second"] == pytest.approx(by_figures, rel=0.03)


def test_a_turn_of_an_agent_alone_takes_what_it_takes_alone():
    """The prefix is shared, so that only new tokens are prefilled."""
    one = virtual.Agents(count=1, shared=4096, answer=8, turns=3)
    found = virtual.agents("2xm4max", "qwen38-27b-4bit", one, seed=1)
    assert found["first_p95"] == pytest.approx(1.0, rel=0.1)
    assert found["alone"] < 0.3 * virtual.beside("2xm4max", "qwen38-27b-4bit", 1, 4096)["alone"]


@pytest.mark.parametrize(
    ("count", "room"), [(1, 1.0), (2, 2.0), pytest.param(4, 3.0, marks=pytest.mark.sweep)]
)
def test_an_agents_turn_finds_all_of_its_prompt_and_answer(count, room):
    """In memory for one row of each, or less: no conversation is held twice, or dropped for another's."""
    found = virtual.sessions("2xm4max", "qwen3-4b-4bit", count, 1, room=room, turns=12)
    assert found["longest"] > 40_000
    assert found["again"] == found["dropped"] == 0
    assert found["answers"] < 0.02, "the last token of each, which no step has computed"


@pytest.mark.parametrize(("room", "mark"), [(2.0, 0), pytest.param(4.0, 3144, marks=pytest.mark.sweep)])
def test_what_memory_has_dropped_comes_from_the_disks(room: float, mark: int) -> None:
    """Six agents with memory for two rows; answers come back in other tokens, as of a model that thinks."""
    sessions = partial(virtual.sessions, "2xm4max", "qwen3-4b-4bit", 6, 1, room, turns=6, mark=mark)
    found = sessions(rendered=True, disk=DiskTime(73_728, 73_728 * mark, 2.6e9, 2.6e9))
    assert found["least"] > 0.1, "memory alone is too small, whatever it keeps"
    assert found["again"] < 0.03


@pytest.mark.parametrize("support", [control.PREFIX_SUPPORT_ANY, control.PREFIX_SUPPORT_EXACT])
def test_agents_that_begin_at_once_compute_their_programs_beginning_once(
    support: control.PrefixSupport.ValueType,
) -> None:
    ring, program, task = virtual.VirtualMacs("2xm4max", "qwen3-4b-4bit", support=support, rows=6), 4096, 300
    for number in range(6):
        said = f"{number % 2:4}".encode() * program + f"{10 + number:4}".encode() * (task + 2)
        ring.ask(f"agent {number}", program + task, 2, said)
    ring.run()
    computed = [program + task - ring.cached[f"agent {number}"] for number in range(6)]
    assert computed == [program + task] * 2 + [task] * 4


def test_all_loads_are_simulated_and_say_so():
    asked = ["--virtual", "1xm3ultra:qwen3-4b-4bit", "--rows", "2", "--at-once", "2", "--agents", "1"]
    result = scheduler.run(parse(find("scheduler"), [*asked, "--seeds", "1"]))
    tables = scheduler.tables(result)
    assert len(tables) == 6
    assert all("simulated" in table.title and len(table.rows) == 1 for table in tables)
    assert scheduler.checks(result) == []
