"""Wake-ups a second of an idle machine with coordinator, gateway, node and engine (Linux only).

A thread that waits and is woken is a voluntary context switch. They are set against three Python processes
with a gRPC server and an open stream each, over which nothing is said. gRPC wakes up in them as well.
It has a thread for each core; to have it see ten, as root:

    echo 0-9 > /tmp/ten; unshare --mount sh -c 'mount --bind /tmp/ten /sys/devices/system/cpu/online;
    exec .venv/bin/python -m bench rest'
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.clusters import Deployment, cluster, family
from bench.frame import Result, Table, progress
from bench.models import by_name
from bench.openai_client import ask
from bench.verdict import Check

TARGET = 3.5
_SETTLE_SECONDS = 12.0
"""From the last request to the beginning: an engine gives memory back 5 s after its work, and rest begins."""

_SILENT = """
import asyncio, grpc.aio

async def quiet(requests, context):
    await asyncio.Event().wait()
    yield b""

async def main():
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(quiet)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rest", {"Quiet": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/rest/Quiet")()
        await call.write(b"")
        print("there", flush=True)
        await call.read()

asyncio.run(main())
"""

QUICK = ("--seconds", "15")
QUICK_SECONDS = 90.0


async def run(options: argparse.Namespace) -> Result:
    silent = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _SILENT, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        for one in silent:
            assert one.stdout is not None
            await one.stdout.readline()
        async with cluster([Deployment("bench", by_name("demo"))]) as made:
            body = {"model": "bench", "messages": [{"role": "user", "content": "ring"}], "max_tokens": 4}
            assert (await ask(made.http_url, body)).ok
            progress(f"watching it rest for {options.seconds:g} s")
            await asyncio.sleep(_SETTLE_SECONDS)
            processes = {name: [one.pid for one in family(pid)] for name, pid in made.processes.items()}
            found = await _wakeups(processes | {"silent": [one.pid for one in silent]}, options.seconds)
    finally:
        for one in silent:
            one.kill()
            await one.wait()
    ours = sum(count for name, count in found.items() if name != "silent")
    return {
        "cores": os.sysconf("SC_NPROCESSORS_ONLN"),
        "wakeups": {name: round(count, 1) for name, count in found.items()},
        "ours": round(ours, 1),
        "ratio": round(ours / found["silent"], 2),
    }


async def _wakeups(processes: dict[str, Sequence[int]], seconds: float) -> dict[str, float]:
    """Wake-ups a second by the names of the processes."""
    before = {name: _switches(pids) for name, pids in processes.items()}
    await asyncio.sleep(seconds)
    return {
        name: (_switches(pids) - before[name]).total() / seconds  # none for threads that are gone
        for name, pids in processes.items()
    }


def _switches(pids: Sequence[int]) -> Counter[str]:
    """Voluntary context switches by thread."""
    found: Counter[str] = Counter()
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with suppress(FileNotFoundError):
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                found[status.parent.name] = int(lines["voluntary_ctxt_switches"])
    return found


def tables(result: Result) -> list[Table]:
    rows = [*result["wakeups"].items(), ("all but silent", result["ours"]), ("ratio", result["ratio"])]
    return [Table(f"wake-ups a second, {result['cores']} cores", ["processes", "wake-ups"], rows)]


def checks(result: Result) -> list[Check]:
    return [Check("wake-ups against three silent processes", [result["ratio"]], TARGET)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0)
