"""What moving a record costs, by its size: ring, pipe, shared memory, AEAD; and MLX's own send and receive.

Ring, pipe and shared memory are round trips between two processes, AEAD is sealing and opening. On the ring
the carrier's way (short records at its connections, long ones by MLX) is compared with MLX for all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.comms_worker import pipe, shared, timed
from bench.frame import Benchmark, Result, Table, progress
from bench.seal import measure as measure_seal
from bench.summaries import percentile
from sealring.mesh.crypto.suites import Suite
from sealring.mesh.system.addresses import free_port
from sealring.node.ipc.channel import EngineChannel, create_channel
from sealring.node.link.records import Kind, RecordHeader

SIZES = (4 << 10, 64 << 10, 512 << 10, 1 << 20, 8 << 20)
_ROOT = Path(__file__).resolve().parents[1]


def run(options: argparse.Namespace) -> Result:
    progress("ring")
    rows = {size: {"bytes": size} for size in SIZES}
    waiting = []
    for found in _ring(options.count):
        size, name = found["bytes"], "ring_mlx" if found["mlx"] else "ring"
        rows[size][f"{name}_us"] = round(percentile(found["us"], 0.5), 1)
        waiting.append(
            {
                "bytes": size,
                "by": "MLX" if found["mlx"] else "carrier",
                **{f"p{part}_us": round(percentile(found["us"], part / 100), 1) for part in (50, 95, 99)},
                "cores": round(found["cores"], 2),
            }
        )
    for size in SIZES:
        progress(f"pipe, shared memory and AEAD, {size} bytes")
        rows[size]["pipe_us"] = _pipe(size, _count(size, options.count))
        rows[size]["shared_us"] = _shared(size, _count(size, options.count))
        aead = measure_seal(Suite.X25519_AES256GCM, size, options.seconds)
        rows[size]["seal_open_us"] = aead["ours_round_us"]
        rows[size]["bare_aead_us"] = aead["bare_round_us"]
    return {"round_trips": list(rows.values()), "waiting": waiting}


def _count(size: int, count: int) -> int:
    return max(10, count * (64 << 10) // max(size, 64 << 10))


def _ring(count: int) -> list[dict[str, Any]]:
    """Two ranks in processes of their own; both ways by turns for each size."""
    plan = [(size, _count(size, count), by_mlx) for size in SIZES for by_mlx in (0, 1, 0, 1)]
    addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
    ranks = []
    for rank in range(2):
        own, other = addresses[rank], addresses[1 - rank]
        arguments = [sys.executable, "-m", "bench.comms_worker", str(rank), own, other, json.dumps(plan)]
        ranks.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=_ROOT, text=True))
    try:
        output, _ = ranks[0].communicate(timeout=300)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    merged: dict[tuple[int, bool], dict[str, Any]] = {}
    for found in map(json.loads, output.splitlines()):
        known = merged.setdefault((found["bytes"], found["mlx"]), found)
        if known is not found:
            known["us"] += found["us"]
            known["cores"] = (known["cores"] + found["cores"]) / 2
    return list(merged.values())


def _pipe(size: int, count: int) -> float:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=pipe, args=(far,), daemon=True)
    process.start()
    data = bytes(size)

    def once() -> None:
        near.send_bytes(data)
        near.recv_bytes()

    timed(once, 10)
    spent = timed(once, count)
    near.send_bytes(b"")
    process.join(10)
    return round(percentile(spent, 0.5), 1)


def _shared(size: int, count: int) -> float:
    """The data channel between engine and carrier, without a carrier's work."""
    ends = create_channel()
    child = os.fork()
    if child == 0:
        try:
            shared(ends.carrier, count + 10)
        finally:
            os._exit(0)
    header = RecordHeader(Kind.ACTIVATIONS, 1, bytes(32), "uint8", (size,), size)
    data = bytes(size)
    with EngineChannel(*ends.engine) as channel:

        def once() -> None:
            channel.expect(header)
            channel.send(header, data)
            channel.receive().release()

        timed(once, 10)
        spent = timed(once, count)
    os.waitpid(child, 0)
    for descriptor in ends.carrier:
        os.close(descriptor)
    return round(percentile(spent, 0.5), 1)


def tables(result: Result) -> list[Table]:
    trips, waiting = result["round_trips"], result["waiting"]
    return [
        Table("round trip, or seal and open, p50 us", list(trips[0]), [list(one.values()) for one in trips]),
        Table("ways on the ring", list(waiting[0]), [list(one.values()) for one in waiting]),
    ]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    sizes = [one["bytes"] for one in result["round_trips"]]
    for name in list(result["round_trips"][0])[1:]:
        axes.plot(sizes, [one[name] for one in result["round_trips"]], marker="o", label=name[:-3])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("us")
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=2000, help="round trips of the smallest record")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each AEAD measurement")


BENCHMARK = Benchmark(
    "comms",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    quick=("--count", "500", "--seconds", "0.1"),
)
