"""What the fault matrix itself has to get right: else it finds nothing."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from acts import ACTS
from answering import Answer
from cases import CASES, SHORT
from harness import MODULES, MOMENTS, Lacking, Outcome, Place, Things, _pause, suffer
from relay import Relay
from ringtest import Ring


def test_every_case_is_of_known_acts_and_moments_and_there_once() -> None:
    for one in (*CASES, *SHORT):
        assert one.moment in {*MOMENTS, "prefill", "decode"}
        assert {act.split()[0] for act in one.acts} <= set(ACTS)
    assert len({one.name for one in CASES}) == len(CASES)


@pytest.mark.parametrize("size", [200, 333])
def test_a_flipped_frame_has_the_right_sum_and_another_payload(size: int) -> None:
    """TCP's sum (RFC 9293, 3.1) over pseudo header, header and payload."""
    segment = bytearray(
        struct.pack(">HHIIBBHHH", 1111, 2222, 1, 1, 5 << 4, 16, 512, 0, 0) + bytes(range(100)) * 4
    )
    segment = segment[: 20 + size]
    addresses = bytes([10, 77, 0, 1, 10, 77, 0, 2])
    struct.pack_into(">H", segment, 16, _sum(addresses, segment))
    frame = bytes(12) + b"\x08\x00" + bytes([0x45, *bytes(8), 6, 0, 0]) + addresses + bytes(segment)
    relay: Any = SimpleNamespace(flips=1, spared={2222})
    assert Relay.flipped(relay, frame) == frame
    relay.spared = set()
    changed = Relay.flipped(relay, frame)
    assert relay.flips == 0
    assert changed[54:] != frame[54:]
    assert _sum(addresses, changed[34:]) == 0


def _sum(addresses: bytes, segment: bytes | bytearray) -> int:
    whole = addresses + struct.pack(">BBH", 0, 6, len(segment)) + segment
    total = sum(struct.unpack(f">{(len(whole) + 1) // 2}H", whole + bytes(len(whole) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def test_what_is_lost_wrong_and_left_is_counted() -> None:
    expected = Answer({0: "Paris."}, end=(1,))
    outcome = Outcome()
    for answer in (expected, Answer({0: "Par"}, error="RING_DOWN"), Answer({0: "Lon"}, error="RING_DOWN")):
        outcome.count(answer, expected)
    outcome.count(Answer({0: "Paris"}, end=(1,)), expected)
    assert (outcome.requests, outcome.lost, outcome.wrong) == (4, 2, 2)
    before, after = Things(), Things()
    for things, count in ((before, 1), (after, 4)):
        things.processes["engine"] = things.descriptors["engine"] = things.files["a"] = count
    assert after.beyond(before) == ["process: engine", "3 descriptors: engine", "file: a"]
    assert before.beyond(after) == []


def test_a_pause_begins_with_the_fault_and_is_of_a_stream_that_had_begun() -> None:
    assert _pause([1.0, 2.0, 7.0, 8.0], at=3.0) == 4.0
    assert _pause([4.0, 9.0], at=3.0) == 0.0
    assert _pause([1.0, 2.0], at=3.0) == 0.0


async def test_a_part_that_is_not_there_yet_is_waited_for() -> None:
    """The ring's own way to find it: an error of its that nobody expects would end the case."""
    ring: Any = SimpleNamespace(cluster=SimpleNamespace(processes={"node-0": os.getpid()}))
    ring.parts = partial(Ring.parts, ring)
    ring.part = partial(Ring.part, ring)
    place: Any = SimpleNamespace(order=["node-0"], ring=ring)
    waiting = asyncio.create_task(Place.process(place, ("carrier", "0")))
    await asyncio.sleep(0)
    assert not waiting.done()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys; sys.stdin.read()", MODULES["carrier"]),
        stdin=asyncio.subprocess.PIPE,
    )
    try:
        assert (await waiting).pid == child.pid
    finally:
        child.kill()
        await child.communicate()


async def test_a_case_that_this_machine_lacks_something_for_is_told_and_no_error() -> None:
    async def prepare(case: object) -> None:
        raise Lacking("no clock to set")

    place: Any = SimpleNamespace(prepare=prepare)
    outcome = await suffer(place, CASES[0])
    assert outcome.lacking == "no clock to set"
    assert not outcome.good
