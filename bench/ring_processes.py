"""The processes of `bench.ring`: engines and carriers of rings, and mlx-lm alone."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.clusters import can_pin
from bench.ring_steps import Gateway
from bench.seal import handshake
from sealring.mesh.crypto.suites import Suite
from sealring.node.carrier.neighbours import PASS_BYTES
from sealring.node.ipc.channel import ChannelEnds, create_channel
from sealring.node.ipc.frames import FrameSocket
from sealring.v1 import engine_pb2 as engine

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"layers": 32, "hidden": 4096, "inter": 14336, "heads": 32, "kv": 8, "vocab": 128256},
    "70b": {"layers": 32, "hidden": 8192, "inter": 28672, "heads": 64, "kv": 8, "vocab": 128256},
    "12x512": {"layers": 12, "hidden": 512, "inter": 1536, "heads": 8, "kv": 8, "vocab": 4096},
    "4x64": {"layers": 4, "hidden": 64, "inter": 128, "heads": 4, "kv": 2, "vocab": 512},
}
FORM_SECONDS = 20
LONGEST_CHUNK = 2048
_ROOT = Path(__file__).resolve().parents[1]

T = TypeVar("T")


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
        "max_position_embeddings": 32768,
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


class Ring:
    """Engines that stay, and the epochs that are run on them one after the other."""

    def __init__(self, options: argparse.Namespace, stages: int, stack: ExitStack) -> None:
        self.options = options
        self.config = configuration(options.shape, options.layers, options.dtype)
        self.split = options.split or split_layers(self.config, stages)
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
        command += ["--lo", str(lo), "--hi", str(hi)]
        process = subprocess.Popen(
            [*command, "--traces", str(self.traces)],
            pass_fds=(theirs.fileno(), far.fileno()),
            env=device_environment(self.options, rank),
            cwd=_ROOT,
        )
        self._pin(process, rank)
        theirs.close()
        far.close()
        with closing(FrameSocket(ours)) as frames, near:
            try:
                yield Member(process, frames, near)
            finally:
                process.kill()
                process.wait(10)

    def _pin(self, process: subprocess.Popen[bytes], rank: int) -> None:
        if self.options.cores and can_pin():
            cores = self.options.cores
            os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})

    def run(self, work: Callable[[Gateway], T], rows: int, sealed: bool = True) -> tuple[T, list[Any]]:
        """One epoch of at most `rows` rows: what `work` makes of it, and what each engine left behind."""
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
                    prefill_chunk=LONGEST_CHUNK,
                    max_rows=rows,
                    kv_budget=1 << 60,
                )
                member.send(open_epoch=opening)
                if ends:
                    socket.send_fds(member.handoff, [str(self.epoch).encode()], list(ends[rank].engine))
                member.event("epoch_opened")
            for end in ends:
                for descriptor in end.engine:
                    os.close(descriptor)
            found = work(Gateway(self.members))
            for member in self.members:
                member.send(close_epoch=engine.CloseEngineEpoch(id=self.epoch))
                member.event("epoch_closed")
        left = [json.loads((self.traces / f"{self.epoch}-{lo}.json").read_text()) for lo in self.lows]
        return found, left

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
        module = "sealring.node.carrier.main" if sealed else "bench.ring_carrier"
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
        with closing(FrameSocket(ours)) as frames:
            try:
                yield frames
            finally:
                process.kill()
                process.wait(10)


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
            [*command, "--config", config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=device_environment(options, options.baseline_gpu),
            cwd=_ROOT,
        )
        if options.cores and can_pin():
            os.sched_setaffinity(self._process.pid, {options.cores[0]})
        stack.callback(self._stop)

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def wait_loaded(self) -> None:
        self._answer()

    def run(self, **work: Any) -> dict[str, Any]:
        """What the process answers to a line (bench.ring_baseline)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the baseline process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
