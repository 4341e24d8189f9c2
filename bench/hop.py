"""One record's way past three waiting threads: asleep against awake when it is due, by turns.

Two processes stand for the carriers of neighbours. A pipe, a TCP connection and a pipe lie between the thread
that sends a record at each step and the one that receives it; all wait as engines and carriers do. It needs
four idle cores: where there are fewer, `node/wire/waiting.py` lets nothing wait awake.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import socket
import statistics
import struct
import time
from functools import partial
from typing import Any

from bench.frame import Result, Table
from bench.verdict import Check, ratios
from sealring.node.wire.waiting import Rhythm, full_speed_cores, polled

QUICK = ("--rounds", "1", "--records", "60")

_SENT = struct.Struct("=d")
_WAYS = {"asleep": False, "awake": True}


def run(options: argparse.Namespace) -> Result:
    """Microseconds of records' ways and of processors a record, round by round, by length of a step."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for step in options.steps_ms:
        ways: dict[str, dict[str, list[float]]] = {way: {"way_us": [], "cpu_us": []} for way in _WAYS}
        for number in range(options.rounds):
            for way in sorted(_WAYS, reverse=bool(number % 2)):
                for name, value in _measure(step / 1000, _WAYS[way], options).items():
                    ways[way][name].append(round(value, 1))
        found[f"{step:g} ms"] = ways
    return {"cores": full_speed_cores(), "jitter": options.jitter, "steps": found}


def _measure(step: float, awake: bool, options: argparse.Namespace) -> dict[str, float]:
    first, second = socket.socketpair(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        answering, _ = server.accept()
    for one in (calling, answering):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fork = multiprocessing.get_context("fork")
    used: Any = fork.SimpleQueue()
    relays = [
        fork.Process(target=_relay, args=(*ends, awake, options.records, used), daemon=True)
        for ends in ((first[1], calling), (answering, second[0]))
    ]
    for relay in relays:
        relay.start()
    sender = fork.Process(target=_send, args=(first[0], step, options.jitter, options.records), daemon=True)
    begun = time.process_time()
    sender.start()
    rhythm = _rhythm(awake)
    ways = [-(_receive(second[1], rhythm) - time.monotonic()) for _ in range(options.records)]
    cpu = time.process_time() - begun + used.get() + used.get()
    for process in (sender, *relays):
        process.join()
    for one in (*first, *second, calling, answering):
        one.close()
    return {"way_us": statistics.median(ways) * 1e6, "cpu_us": cpu / options.records * 1e6}


def _rhythm(awake: bool) -> Rhythm:
    return Rhythm(awake=lambda: awake)


def _receive(end: socket.socket, rhythm: Rhythm) -> float:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    rhythm.wait(partial(polled, poll))
    sent: float
    (sent,) = _SENT.unpack(end.recv(_SENT.size))
    return sent


def _relay(source: socket.socket, target: socket.socket, awake: bool, records: int, used: Any) -> None:
    rhythm, begun = _rhythm(awake), time.process_time()
    for _ in range(records):
        target.sendall(_SENT.pack(_receive(source, rhythm)))
    used.put(time.process_time() - begun)


def _send(end: socket.socket, step: float, jitter: float, records: int) -> None:
    """Sends at even intervals, each longer or shorter by up to a part `jitter`, as a device's steps are."""
    source = iter(os.urandom(records))
    for _ in range(records):
        time.sleep(step * (1 + jitter * (next(source) / 128 - 1)))
        end.sendall(_SENT.pack(time.monotonic()))
    end.close()


def tables(result: Result) -> list[Table]:
    rows = [
        [step, *(" ".join(map(str, ways[way][name])) for name in ("way_us", "cpu_us") for way in _WAYS)]
        for step, ways in result["steps"].items()
    ]
    columns = ["step", "way, asleep", "way, awake", "CPU a record, asleep", "CPU a record, awake"]
    return [Table(f"us, round by round; {result['cores']} cores at full speed", columns, rows)]


def checks(result: Result) -> list[Check]:
    """Each round's worst step; nothing where cores are too few."""
    if result["cores"] < 8:
        return []
    steps = [ratios(ways["awake"]["way_us"], ways["asleep"]["way_us"]) for ways in result["steps"].values()]
    worst = [max(one or 0.0 for one in each) for each in zip(*steps, strict=True)]
    return [Check("a record's way, awake / asleep", worst, 0.8)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps-ms", type=_steps, default=[5.0, 20.0, 40.0], help="times of steps in ms, such as 5,20"
    )
    parser.add_argument("--jitter", type=float, default=0.01, help="part by which steps differ")
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)


def _steps(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
