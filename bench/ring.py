"""The data plane alone: engines and carriers of a ring without gateway and daemons, against one process.

Engines and carriers are the product's processes; weights are random and made where they are used, so a ring
can be of any shape and on any device. Steps are announced as a gateway does, per lane the one in flight and
one more. The baseline is mlx-lm's BatchGenerator with the same weights in one process. All of a run's
rings are measured by turns in each round, so that its ratios hold whatever else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.frame import Benchmark, Check, Result, Table, progress
from bench.seal import handshake
from mesh.frames import FrameSocket
from mesh.suites import Suite
from node.carrier.neighbours import PASS_BYTES
from node.channel import ChannelEnds, create_channel
from node.engine import params
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"layers": 32, "hidden": 4096, "inter": 14336, "heads": 32, "kv": 8, "vocab": 128256},
    "70b": {"layers": 32, "hidden": 8192, "inter": 28672, "heads": 64, "kv": 8, "vocab": 128256},
    "12x512": {"layers": 12, "hidden": 512, "inter": 1536, "heads": 8, "kv": 8, "vocab": 4096},
    "4x64": {"layers": 4, "hidden": 64, "inter": 128, "heads": 4, "kv": 2, "vocab": 512},
}
FORM_SECONDS = 20
PARAMETER_BYTES = len(params.encode(params.RowParameters()))
ROWS_PER_PREFILL = 8
_ROOT = Path(__file__).resolve().parents[1]


def configuration(shape: str, layers: int, dtype: str) -> dict[str, Any]:
    """The config.json of a llama of that shape, with another number of layers if `layers` is not 0."""
    sizes = SHAPES[shape]
    return {
        "model_type": "llama",
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": layers or sizes["layers"],
        "intermediate_size": sizes["inter"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv"],
        "head_dim": sizes["hidden"] // sizes["heads"],
        "rms_norm_eps": 1e-5,
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "torch_dtype": dtype,
    }


def split_layers(config: dict[str, Any], stages: int) -> list[int]:
    """Layers of each stage, the output head counted by its bytes, so that no stage reads much more."""
    hidden, width = config["hidden_size"], config["head_dim"]
    keys = config["num_key_value_heads"] * width
    layer = hidden * (2 * hidden + 2 * keys + 3 * config["intermediate_size"])
    head = config["vocab_size"] * hidden / layer
    layers: int = config["num_hidden_layers"]
    best = min(
        range(1, layers - stages + 2) if stages > 1 else [layers],
        key=lambda tail: (max(tail + head, -(-(layers - tail) // max(1, stages - 1))), -tail),
    )
    rest, others = layers - best, stages - 1
    return [rest // others + (rank < rest % others) for rank in range(others)] + [best] if others else [best]


@dataclass
class Member:
    """An engine process, as its daemon sees it."""

    process: subprocess.Popen[bytes]
    frames: FrameSocket
    handoff: socket.socket

    def send(self, **command: Any) -> None:
        self.frames.send(engine.EngineCommand(**command))

    def event(self, kind: str) -> Any:
        """The next event, which must be of that kind."""
        event = self.frames.receive(engine.EngineEvent)
        if event is None or event.WhichOneof("event") != kind:
            raise RuntimeError(f"engine said {event}, not {kind}")
        return getattr(event, kind)


@dataclass
class Lane:
    number: int
    rows: list[int]
    announced: int = 0
    done: list[float] = field(default_factory=list)


class Ring:
    """Engines that stay, and the epochs that are run on them one after the other."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options = options
        self.config = configuration(options.shape, options.layers, options.dtype)
        self.split = options.split or split_layers(self.config, options.stages)
        self.size = len(self.split)
        self.traces = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.epoch = 0
        bounds = [0, *itertools.accumulate(self.split)]
        self.lows = bounds[:-1]
        self.members = [
            stack.enter_context(self._engine(rank, bounds[rank], bounds[rank + 1]))
            for rank in range(self.size)
        ]

    def wait_loaded(self) -> None:
        for member in self.members:
            member.event("ready")

    @contextmanager
    def _engine(self, rank: int, lo: int, hi: int) -> Iterator[Member]:
        ours, theirs = socket.socketpair()
        near, far = socket.socketpair()
        command = [sys.executable, "-m", "bench.ring_engine", "--config", json.dumps(self.config)]
        command += ["--control-fd", str(theirs.fileno()), "--handoff-fd", str(far.fileno())]
        command += ["--lo", str(lo), "--hi", str(hi), "--prompt", str(self.options.prompt)]
        process = subprocess.Popen(
            [*command, "--traces", str(self.traces)],
            pass_fds=(theirs.fileno(), far.fileno()),
            env=device_environment(self.options, rank),
            cwd=_ROOT,
        )
        self._pin(process, rank)
        theirs.close()
        far.close()
        try:
            yield Member(process, FrameSocket(ours), near)
        finally:
            process.kill()
            process.wait(10)

    def _pin(self, process: subprocess.Popen[bytes], rank: int) -> None:
        if self.options.cores:
            cores = self.options.cores
            os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})

    def run(self, lanes: int, rows: int, sealed: bool) -> dict[str, Any]:
        """One epoch: `lanes` lanes of `rows` rows are prefilled and decoded."""
        self.epoch += 1
        with ExitStack() as stack:
            ends = [create_channel() for _ in range(self.size)] if self.size > 1 else []
            if ends:
                self._form(stack, ends, sealed)
            for rank, member in enumerate(self.members):
                opening = engine.OpenEngineEpoch(
                    id=self.epoch,
                    epoch=self.epoch,
                    rank=rank,
                    size=self.size,
                    prefill_chunk=2048,
                    max_rows=lanes * rows,
                    kv_budget=1 << 60,
                )
                member.send(open_epoch=opening)
                if ends:
                    socket.send_fds(member.handoff, [str(self.epoch).encode()], list(ends[rank].engine))
                member.event("epoch_opened")
            for end in ends:
                for descriptor in end.engine:
                    os.close(descriptor)
            found = self._steps(lanes, rows)
            for member in self.members:
                member.send(close_epoch=engine.CloseEngineEpoch(id=self.epoch))
                member.event("epoch_closed")
        left = [json.loads((self.traces / f"{self.epoch}-{lo}.json").read_text()) for lo in self.lows]
        return (
            found | summary(left, found.pop("decode_from")) | {"lanes": lanes, "rows": rows, "sealed": sealed}
        )

    def _form(self, stack: ExitStack, ends: list[ChannelEnds], sealed: bool) -> None:
        suite = Suite(self.options.suite)
        outgoing: list[bytes] = [b""] * self.size
        incoming: list[bytes] = [b""] * self.size
        for rank in range(self.size):
            after = (rank + 1) % self.size
            first, second = handshake(suite, (rank, after))
            outgoing[rank], incoming[after] = first.to_carrier(), second.to_carrier()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(self.size)]
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        passes = [os.urandom(PASS_BYTES) for _ in range(self.size)]
        carriers = [
            stack.enter_context(self._carrier(rank, ends[rank], listeners[rank], sealed))
            for rank in range(self.size)
        ]
        for rank, frames in enumerate(carriers):
            expect(frames, "ready")
            start = engine.StartCarrier(
                rank=rank,
                size=self.size,
                next_address=addresses[(rank + 1) % self.size],
                outgoing_keys=outgoing[rank],
                incoming_keys=incoming[rank],
                outgoing_pass=passes[rank],
                incoming_pass=passes[rank - 1],
                form_timeout_ms=FORM_SECONDS * 1000,
            )
            frames.send(engine.CarrierCommand(start=start))
            frames.send(engine.CarrierCommand(form=engine.FormGroup()))
        for frames in carriers:
            expect(frames, "up")

    @contextmanager
    def _carrier(
        self, rank: int, ends: ChannelEnds, listener: socket.socket, sealed: bool
    ) -> Iterator[FrameSocket]:
        ours, theirs = socket.socketpair()
        module = "node.carrier.main" if sealed else "bench.ring_carrier"
        command = [sys.executable, "-m", module, "--control-fd", str(theirs.fileno())]
        environment = dict(os.environ)
        if self.options.carrier_path:
            environment["PYTHONPATH"] = f"{self.options.carrier_path}:{_ROOT}"
            environment.pop("LD_LIBRARY_PATH", None)
        command += ["--listen-fd", str(listener.fileno())]
        process = subprocess.Popen(
            [*command, "--channel-fds", ",".join(map(str, ends.carrier))],
            pass_fds=(theirs.fileno(), *ends.carrier, listener.fileno()),
            env=environment,
            cwd=_ROOT,
        )
        self._pin(process, rank)
        theirs.close()
        listener.close()
        for descriptor in ends.carrier:
            os.close(descriptor)
        try:
            yield FrameSocket(ours)
        finally:
            process.kill()
            process.wait(10)

    def _steps(self, lanes: int, rows: int) -> dict[str, Any]:
        """The gateway's part."""
        head, number, length = self.members[0], 0, self.options.prompt

        def announce(**work: Any) -> int:
            nonlocal number
            number += 1
            step = control.Step(number=number, **work)
            for member in self.members:
                member.send(step=step)
            return number

        begun = time.perf_counter()
        numbers = range(1, lanes * rows + 1)
        for first in range(0, len(numbers), ROWS_PER_PREFILL):
            chunks = [
                control.Chunk(
                    row=row, start=0, end=length, prompt_tokens=length, params_bytes=PARAMETER_BYTES
                )
                for row in numbers[first : first + ROWS_PER_PREFILL]
            ]
            announce(prefill=control.Prefill(chunks=chunks))
        while head.event("done").step < number:
            pass
        prefilled = time.perf_counter() - begun
        steps = self.options.warm + self.options.steps
        working = [Lane(lane, list(numbers[lane * rows : (lane + 1) * rows])) for lane in range(lanes)]
        lane_of: dict[int, Lane] = {}

        def decode(lane: Lane) -> None:
            admits = [
                control.Change(admit=control.Admit(row=row, lane=lane.number))
                for row in ([] if lane.announced else lane.rows)
            ]
            lane_of[announce(changes=admits, decode=control.Decode(lane=lane.number))] = lane
            lane.announced += 1

        decode_from = number + 1 + lanes * self.options.warm
        for _ in range(2):
            for lane in working:
                decode(lane)
        while any(len(lane.done) < steps for lane in working):
            done = head.event("done")
            lane = lane_of.pop(done.step)
            lane.done.append(time.perf_counter())
            if lane.announced < steps:
                decode(lane)
        begin = max(lane.done[self.options.warm - 1] for lane in working)
        end = min(lane.done[-1] for lane in working)
        made = sum(rows for lane in working for at in lane.done if begin < at <= end)
        return {
            "tokens_per_second": made / (end - begin),
            "prefill_tokens_per_second": lanes * rows * length / prefilled,
            "decode_from": decode_from,
        }


def summary(left: list[dict[str, Any]], decode_from: int) -> dict[str, Any]:
    """Medians of every stage's decode steps in ms, and of the way of records between stages."""
    by_step = [{one["step"]: one for one in each["trace"] if one["step"] >= decode_from} for each in left]
    names = ("started", "built", "fed", "launched", "ready", "sent")
    stages = []
    for rank, steps in enumerate(by_step):
        entry: dict[str, Any] = {}
        kept = [name for name in names if steps and name in next(iter(steps.values()))]
        for before, after in itertools.pairwise(kept):
            entry[f"{before}-{after}"] = middle([one[after] - one[before] for one in steps.values()])
        ordered = [steps[number] for number in sorted(steps)]
        entry["period"] = middle([b["ready"] - a["ready"] for a, b in itertools.pairwise(ordered)])
        entry["fed-ready"] = middle([one["ready"] - one["fed"] for one in ordered])
        if len(by_step) > 1:
            entry["hop"] = hop(by_step, rank)
        stages.append(entry)
    tokens = {int(row): each for row, each in left[0]["tokens"].items()}
    return {
        "stages": stages,
        "tokens": [tokens[row] for row in sorted(tokens)],
        "peak_memory": [each["peak_memory"] for each in left],
    }


def hop(by_step: list[dict[int, Any]], rank: int) -> float | None:
    """From the end of a step's compute to its input on the next stage, where that one waited for it."""
    after = by_step[(rank + 1) % len(by_step)]
    ways = []
    if rank + 1 < len(by_step):
        pairs = [(one, after[number]) for number, one in by_step[rank].items() if number in after]
    else:
        pairs = []
    for one, there in pairs:
        if there["started"] < one["ready"]:
            ways.append(there["fed"] - one["ready"])
    return middle(ways) if ways else None


def middle(values: list[float]) -> float:
    return round(statistics.median(values) * 1000, 3) if values else 0.0


def expect(frames: FrameSocket, kind: str) -> None:
    """Waits for a carrier's event; what it asks of a daemon meanwhile is done."""
    event = frames.receive(engine.CarrierEvent)
    if event is not None and event.WhichOneof("event") == "knock":
        with knocked(event.knock.port):
            return expect(frames, kind)
    if event is None or event.WhichOneof("event") != kind:
        raise RuntimeError(f"carrier said {event}, not {kind}")


def knocked(port: int) -> socket.socket:
    """A connection to a carrier that forms its group, once it listens."""
    until = time.monotonic() + FORM_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def device_environment(options: argparse.Namespace, rank: int) -> dict[str, str]:
    """The environment of a process that computes: one GPU each, by turns."""
    if not options.gpus:
        return dict(os.environ)
    return dict(os.environ) | {"CUDA_VISIBLE_DEVICES": str(rank % options.gpus)}


class Baseline:
    """The process of `bench.ring_baseline`."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        config = json.dumps(configuration(options.shape, options.layers, options.dtype))
        self._options = options
        command = [sys.executable, "-m", "bench.ring_baseline"]
        self._process = subprocess.Popen(
            [*command, "--config", config, "--prompt", str(options.prompt)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=device_environment(options, options.baseline_gpu),
            cwd=_ROOT,
        )
        if options.cores:
            os.sched_setaffinity(self._process.pid, {options.cores[0]})
        stack.callback(self._stop)

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def wait_loaded(self) -> None:
        self._answer()

    def run(self, rows: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows} {self._options.steps} {self._options.warm}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the baseline process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(options: argparse.Namespace) -> Result:
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        begun = time.perf_counter()
        ring = Ring(options, stack)
        baseline = Baseline(options, stack) if options.baseline else None
        ring.wait_loaded()
        if baseline is not None:
            baseline.wait_loaded()
        progress(f"loaded in {time.perf_counter() - begun:.1f} s, layers {ring.split}")
        for number in range(options.rounds):
            for rows in options.baseline:
                assert baseline is not None
                found.append({"round": number, "name": f"one process, {rows} rows"} | baseline.run(rows))
                progress(line(found[-1]))
            for lanes, rows in options.runs:
                for sealed in [True, False] if options.unsealed else [True]:
                    name = f"{ring.size} stages, {lanes} x {rows} rows" + ("" if sealed else ", unsealed")
                    found.append({"round": number, "name": name} | ring.run(lanes, rows, sealed))
                    progress(line(found[-1]))
    return {"shape": options.shape, "split": ring.split, "dtype": options.dtype} | digest(found)


def line(one: dict[str, Any]) -> str:
    parts = [f"round {one['round']}: {one['name']}: {one['tokens_per_second']:.1f} tokens/s"]
    parts += [f"    stage {rank}: {stage}" for rank, stage in enumerate(one.get("stages", []))]
    return "\n  ".join(parts)


def digest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, their ratios, and whether all made the same tokens for the same rows."""
    rates: dict[str, list[float]] = {}
    for one in found:
        rates.setdefault(one["name"], []).append(one["tokens_per_second"])
    medians = {name: statistics.median(each) for name, each in rates.items()}
    reference: list[list[int]] = max((one["tokens"] for one in found), key=len)
    same = [
        a[: len(b)] == b[: len(a)]
        for one in found
        for a, b in zip(reference, one.pop("tokens"), strict=False)
    ]
    ratios = {
        f"{a} / {b}": round(statistics.median([x / y for x, y in zip(rates[a], rates[b], strict=True)]), 3)
        for a in rates
        for b in rates
        if a != b and "stages" in a
    }
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "ratios": ratios,
        "same_tokens": round(sum(same) / max(1, len(same)), 3),
        "runs": found,
    }


TARGETS = {
    ("70b", "2 stages, 2 x 32 rows / one process, 64 rows"): 0.90,
    ("8b", "2 stages, 2 x 32 rows / one process, 64 rows"): 0.85,
    ("70b", "4 stages, 4 x 32 rows / one process, 128 rows"): 0.80,
    ("70b", "2 stages, 2 x 32 rows / 2 stages, 1 x 1 rows"): 45,
    ("8b", "2 stages, 2 x 32 rows / 2 stages, 1 x 1 rows"): 45,
    ("70b", "2 stages, 2 x 32 rows / 2 stages, 2 x 32 rows, unsealed"): 0.98,
    ("8b", "2 stages, 2 x 32 rows / 2 stages, 2 x 32 rows, unsealed"): 0.98,
}
"""Ratios that are asked for, of the shapes that are meant for GPUs."""


def checks(result: Result) -> list[Check]:
    return [
        Check(f"{shape}: {name}", result["ratios"][name], target, True)
        for (shape, name), target in TARGETS.items()
        if shape == result["shape"] and name in result["ratios"]
    ]


def tables(result: Result) -> list[Table]:
    rates = [[name, rate] for name, rate in result["tokens_per_second"].items()]
    title = f"{result['shape']}, layers {result['split']}, {result['dtype']}"
    ratios = [[name, ratio] for name, ratio in result["ratios"].items()]
    return [Table(title, ["what", "tokens/s"], rates), Table("ratios", ["what", "ratio"], ratios)]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    names = list(result["tokens_per_second"])
    axes.barh(names[::-1], [result["tokens_per_second"][name] for name in names[::-1]])
    axes.set_xlabel("tokens per second")
    axes.set_title(f"{result['shape']}, layers {result['split']}")


def runs(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        lanes, _, rows = part.partition("x")
        found.append((int(lanes), int(rows)))
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="12x512")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--split", type=numbers, help="layers of each stage, instead of an even share")
    parser.add_argument("--runs", type=runs, default=[(2, 4), (1, 1)], help="LANESxROWS,...")
    parser.add_argument("--baseline", type=numbers, default=[], help="rows of one process, ...")
    parser.add_argument("--unsealed", action="store_true", help="each ring a second time without sealing")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--warm", type=int, default=8, help="steps of each lane before the measurement")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--suite", default=Suite.HYBRID_AES256GCM.value)
    parser.add_argument("--gpus", type=int, default=0, help="engine r computes on GPU r modulo this")
    parser.add_argument("--baseline-gpu", type=int, default=0)
    parser.add_argument("--cores", type=numbers, default=[], help="a stage's processes on one core each")
    parser.add_argument("--carrier-path", default="", help="where carriers find their packages, if elsewhere")


BENCHMARK = Benchmark(
    "ring",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--shape", "4x64", "--steps", "32", "--baseline", "8,1"),
)


def main() -> None:
    """Without the `sealring` command and its packages: options, then `--json FILE` last."""
    from bench.frame import measure, write_json

    arguments = sys.argv[1:]
    out = None
    if len(arguments) > 1 and arguments[-2] == "--json":
        out = Path(arguments[-1])
        arguments = arguments[:-2]
    report = measure(BENCHMARK, arguments)
    if out is not None:
        write_json(report, out)
    for table in tables(report["data"]):
        sys.stdout.write("\n".join([table.title, *("  ".join(map(str, row)) for row in table.rows), ""]))


if __name__ == "__main__":
    main()
