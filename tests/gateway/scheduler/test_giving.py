"""A key that holds all rows gives some to another one, which has waited, and its answers lose nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from requestkit import request_of

from sealring.gateway.scheduler import OpenRow, Pause
from sealring.gateway.scheduler.giving import LEAST, PATIENCE
from sealring.mesh.ring import Composition
from sealring.v1 import inference_pb2 as inference
from tests.gateway.scheduler.test_scheduler import Driver

ENOUGH = 20 * LEAST
"""Steps in which each of eight rows brings LEAST tokens, in whichever lanes they are."""


def flooded(requests: int = 12, *, rows: int = 8, steps: int = ENOUGH, max_tokens: int = 2000) -> Driver:
    """A ring whose rows are all of one key, which has more requests that wait."""
    driver = Driver(1, max_rows=rows)
    for number in range(requests):
        driver.ask(f"greedy{number}", max_tokens=max_tokens, key="greedy")
    driver.done(steps)
    return driver


def wait(driver: Driver, seconds: float = PATIENCE, steps: int = 30) -> None:
    driver.take(driver.scheduler.expire(driver.now))
    driver.now += seconds
    driver.take(driver.scheduler.expire(driver.now))
    driver.done(steps)


def rows_of(driver: Driver) -> Counter[str]:
    """The rows of each key that have memory."""
    planner = driver.scheduler.planner
    assert planner is not None
    return Counter(one.key for row, one in driver.rows.items() if row in planner.ledger)


def resumed(driver: Driver) -> list[str]:
    """The requests that the head was given again, with the answer so far."""
    given = (one for one in driver.actions if isinstance(one, OpenRow))
    return [one.request.id for one in given if one.resume is not None]


def test_the_newest_request_of_a_key_that_has_all_rows_gives_way_and_goes_on() -> None:
    driver = flooded()
    driver.ask("modest", max_tokens=50, key="modest")
    wait(driver, 0.6 * PATIENCE)
    assert rows_of(driver) == {"greedy": 8}, "some row may end by itself"
    wait(driver, 0.6 * PATIENCE)
    assert rows_of(driver) == {"greedy": 7, "modest": 1}
    driver.done(100)
    assert driver.finished == {"modest": 50}
    assert resumed(driver) == ["greedy7"]
    assert rows_of(driver) == {"greedy": 8}
    running = {driver.rows[row].id for rows in driver.lanes.values() for row in rows}
    assert "greedy7" in running, "it goes on before others of its key begin"
    driver.finish()
    assert driver.finished == {"modest": 50, **{f"greedy{number}": 2000 for number in range(12)}}
    assert not driver.failed


def test_a_request_that_brought_little_does_not_give_way() -> None:
    driver = flooded(8, steps=20)
    driver.ask("modest", max_tokens=50, key="modest")
    wait(driver)
    assert rows_of(driver) == {"greedy": 8}
    driver.done(ENOUGH)
    wait(driver)
    assert rows_of(driver) == {"greedy": 7, "modest": 1}


def test_a_row_without_a_chunk_gives_up_its_memory_and_stays_with_the_head() -> None:
    driver = Driver(1, budget=4096, chunk=16)
    for number in range(8):
        driver.ask(f"long{number}", prompt=400, max_tokens=100, key="greedy")
    driver.done(2)
    assert rows_of(driver) == {"greedy": 8}
    driver.ask("short", max_tokens=5, key="modest")
    wait(driver, steps=0)
    assert rows_of(driver) == {"greedy": 7, "modest": 1}
    driver.finish()
    assert next(iter(driver.finished)) == "short"
    assert len(driver.finished) == len(driver.rows) == 9


def test_after_a_row_without_a_chunk_gave_up_its_memory_others_still_give_way() -> None:
    driver = Driver(1, max_rows=4, chunk=16)
    for number in range(4):
        driver.ask(f"greedy{number}", prompt=200, max_tokens=3000, key="greedy")
    driver.ask("modest", max_tokens=50, key="modest")
    wait(driver, steps=ENOUGH)
    assert driver.finished == {"modest": 50}
    assert rows_of(driver) == {"greedy": 4}, "that row has its memory again, and runs"
    driver.ask("third", max_tokens=50, key="third")
    wait(driver, steps=ENOUGH)
    assert driver.finished == {"modest": 50, "third": 50}


def test_two_answers_of_which_one_has_no_memory_yet_give_up_what_they_have() -> None:
    """They go on in a ring with fewer rows."""
    driver = Driver(1, max_rows=4, chunk=64)
    for name, choices in (("first", 1), ("second", 1), ("pair", 2)):
        driver.prompts[name] = 2000
        driver.take(driver.scheduler.submit(request_of(name, 2000, "greedy", choices=choices), driver.now))
    driver.done(300)
    driver.lose()
    driver.facts = dataclasses.replace(driver.facts, max_rows=3)
    driver.attach()
    driver.ask("modest", max_tokens=50, key="modest")
    wait(driver, steps=0)
    assert rows_of(driver)["modest"] == 1
    driver.finish()
    assert driver.finished == {"modest": 50, "first": 2000, "second": 2000, "pair": 4000}


def test_two_greedy_keys_have_their_shares_and_take_none_of_each_other() -> None:
    driver = flooded(12)
    for number in range(12):
        driver.ask(f"other{number}", max_tokens=2000, key="other")
    for _ in range(4):
        wait(driver)
    assert rows_of(driver) == {"greedy": 4, "other": 4}
    for _ in range(10):
        wait(driver)
    assert rows_of(driver) == {"greedy": 4, "other": 4}
    assert len(resumed(driver)) <= 4
    driver.finish()
    assert set(driver.finished.values()) == {2000}
    assert len(driver.finished) == 24
    assert len(resumed(driver)) == 4, "what has its share or less gives nothing"


def test_a_request_for_as_many_answers_as_there_are_rows_gives_way() -> None:
    driver = Driver(1, max_rows=8)
    driver.prompts["many"] = 10
    driver.take(driver.scheduler.submit(request_of("many", 2000, "greedy", choices=8), driver.now))
    driver.done(ENOUGH)
    driver.ask("modest", max_tokens=500, key="modest")
    wait(driver, steps=100)
    assert rows_of(driver) == {"greedy": 7, "modest": 1}
    assert Counter(resumed(driver)) == {"many": 8}
    driver.finish()
    assert driver.finished == {"modest": 500, "many": 8 * 2000}
    paused = [one.request.id for one in driver.actions if isinstance(one, Pause)]
    assert paused == ["many"]


def test_what_would_not_make_room_does_not_give_way() -> None:
    driver = Driver(1, budget=4096)
    driver.ask("whole", prompt=1000, max_tokens=1000, key="greedy")
    driver.ask("small", max_tokens=800, key="greedy")
    driver.done(3 * LEAST)
    driver.ask("large", prompt=1000, max_tokens=2900, key="modest")
    wait(driver)
    assert rows_of(driver) == {"greedy": 2}
    driver.finish()
    assert not resumed(driver)
    assert driver.finished == {"whole": 1000, "small": 800, "large": 2900}


def test_the_client_of_a_sealed_request_asks_for_the_rest() -> None:
    driver = Driver(1, max_rows=4)
    sealed = inference.Envelope(sealed=b"s")
    for number in range(4):
        driver.prompts[f"sealed{number}"] = 10
        request = request_of(f"sealed{number}", 2000, "greedy", envelope=sealed)
        driver.take(driver.scheduler.submit(request, driver.now))
    driver.done(ENOUGH)
    driver.ask("modest", max_tokens=50, key="modest")
    wait(driver)
    assert driver.failed == {"sealed3": "EPOCH_ENDED"}
    assert rows_of(driver) == {"greedy": 3, "modest": 1}


def test_what_goes_on_by_its_clients_word_comes_before_others_of_its_key() -> None:
    driver = flooded(steps=1)
    request = request_of("resumed", 5, "greedy")
    request.progress.claimed = 1
    driver.prompts["resumed"] = 10
    driver.take(driver.scheduler.submit(request, driver.now))
    assert "resumed" in {one.id for one in driver.rows.values()}, "the head has it, though others wait longer"


@pytest.mark.parametrize("rows", [2, 8])
def test_a_key_that_is_alone_waits_for_its_rows(rows: int) -> None:
    driver = flooded(3 * rows, rows=rows)
    wait(driver)
    wait(driver)
    assert not resumed(driver)


def test_members_take_every_step() -> None:
    driver = flooded(20)
    for number in range(6):
        driver.ask(f"other{number}", max_tokens=200, key="other")
    for _ in range(5):
        wait(driver)
    assert resumed(driver)
    driver.finish()
    composition = Composition(epoch=1, max_rows=8, prefill_chunk=256)
    for step in driver.steps:
        composition.apply(step)
    assert composition.rows == 0
