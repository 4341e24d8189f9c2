"""A trace of a real ring: what its members did, on one clock."""

import asyncio
import contextlib
import json
import os
import sys

import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.cli.tracing import member_shares
from sealring.mesh.errors import SealringError
from sealring.v1 import trace_pb2

pytestmark = CLUSTER

STEPS = {
    trace_pb2.ACTIVITY_WAIT,
    trace_pb2.ACTIVITY_BUILD,
    trace_pb2.ACTIVITY_LAUNCH,
    trace_pb2.ACTIVITY_COMPUTE,
    trace_pb2.ACTIVITY_COPY_OUT,
    trace_pb2.ACTIVITY_COPY_IN,
    trace_pb2.ACTIVITY_SEAL,
    trace_pb2.ACTIVITY_SEND,
    trace_pb2.ACTIVITY_RECEIVE,
    trace_pb2.ACTIVITY_OPEN,
}
MARK = "Zanzibar-7431"


@contextlib.asynccontextmanager
async def working(ring, text, *, rows=3, tokens=40, pause=0.0):
    """A ring that works throughout the block, with `pause` seconds between requests."""

    async def ask_on():
        while not ended:
            await ring.ask(chat(text), tokens)
            await asyncio.sleep(pause)

    ended = False
    asking = asyncio.gather(*(ask_on() for _ in range(rows)))
    try:
        yield
    finally:
        ended = True
        await asking


async def test_a_ring_tells_where_its_time_went(ring):
    await ring.idle()
    admin = ring.cluster.admin
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:  # the last step of an earlier request may still be on its way
            idle = await admin.call("TraceRing", milliseconds=50)
            if [list(member.spans) for member in idle.members] == [[], [], []]:
                break
    assert all(one.idle > 99 for one in member_shares(idle))
    async with working(ring, f"Name the planets. {MARK}\n" * 12):
        both = [admin.call("TraceRing", milliseconds=500, seconds=60) for _ in range(2)]
        ends = await asyncio.gather(*both, return_exceptions=True)
        (trace,) = (one for one in ends if not isinstance(one, BaseException))
        milliseconds = 1000
        while len(shared_steps(trace)) <= 10:  # a busy machine has computed little meanwhile
            trace = await admin.call("TraceRing", milliseconds=milliseconds, seconds=120)
            milliseconds = min(2 * milliseconds, 60_000)
    (second,) = (one for one in ends if isinstance(one, SealringError))
    assert second.reason == "TRACE_BUSY"
    assert MARK.encode() not in trace.SerializeToString()
    with pytest.raises(SealringError) as unknown:
        await admin.call("TraceRing", ring="x", milliseconds=1)
    assert unknown.value.reason == "NO_SUCH_RING"
    check_members(trace)


def check_members(trace):
    assert [member.rank for member in trace.members] == [0, 1, 2]
    end = trace.start + trace.duration
    for member in trace.members:
        assert not member.HasField("problem")
        assert {span.activity for span in member.spans} == STEPS
        assert 0 < member.clock_error < 5_000_000_000
        inside = [span for span in member.spans if trace.start <= span.start <= end]
        assert inside
    shared = shared_steps(trace)
    for member in trace.members:
        assert {span.step for span in member.spans} >= shared
    for shares in (one.shares for one in member_shares(trace)):
        assert 0 < shares["compute"] + shares["launch"] <= 200
        assert 0 < shares["seal"] < 50
    for member in trace.members:
        assert abs(member.clock_offset) <= member.clock_error


def shared_steps(trace):
    """The steps that all members have to show: those of any member between two that all have begun.

    A step that only evicts rows computes nothing, so no member shows it. Each activity has a thread, which
    takes one step after the other. So it leaves nothing out between the first step that it begins after
    `since` and its last one. A margin of some steps would not do: nothing comes back for most chunks of a
    prompt, so the head may be as many steps ahead as the prompt has chunks.
    """
    since = max(member.since + member.clock_error for member in trace.members)
    found = {}
    for member in trace.members:
        for span in member.spans:
            if span.start > since:
                found.setdefault((member.rank, span.activity), set()).add(span.step)
    if len(found) < len(trace.members) * len(STEPS):
        return set()
    between = range(max(map(min, found.values())), min(map(max, found.values())) + 1)
    return set().union(*found.values()).intersection(between)


async def test_the_command_prints_shares(ring):
    command = [sys.executable, "-m", "sealring.cli", "trace", "--json", "--duration"]
    environment = os.environ | {"SEALRING_CLI_OPERATOR": str(ring.cluster.operator_bundle)}
    wanted, shares, seconds = {"wait", "seal", "send", "open", "compute"}, set(), 1
    async with working(ring, "Hello!", rows=1, tokens=8, pause=0.2):
        while not wanted <= shares:  # a busy machine may compute nothing for a second
            process = await asyncio.create_subprocess_exec(
                *command,
                f"{seconds}s",
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            printed, said = await process.communicate()
            assert process.returncode == 0, said
            shown = json.loads(printed)
            shares, seconds = shown["members"][0]["shares"].keys(), 2 * seconds
    assert [member["rank"] for member in shown["members"]] == [0, 1, 2]
