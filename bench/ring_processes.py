"""The processes of `bench.ring`: engines and carriers of rings."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.clusters import pin
from bench.ring_steps import LONGEST_CHUNK, Gateway
from bench.rivals import ROOT, started
from sealring.mesh.crypto import SoftwareSigner, Suite, member_id
from sealring.node.carrier.neighbours import PASS_BYTES
from sealring.node.link.handshake import EphemeralLedger, Initiator, Responder
from sealring.node.link.keys import SessionKeys
from sealring.node.link.params import LinkParams
from sealring.node.wire.channel import ChannelEnds, create_channel
from sealring.node.wire.frames import FrameSocket
from sealring.v1 import engine_pb2 as engine

FORM_SECONDS = 20
SUITE = Suite.HYBRID_AES256GCM

T = TypeVar("T")


def split_layers(config: dict[str, Any], stages: int) -> list[int]:
    """Layers of each stage, the output head counted by its bytes, so that no stage reads much more."""
    hidden, width = config["hidden_size"], config["head_dim"]
    keys = config["num_key_value_heads"] * width
    layer = hidden * (2 * hidden + 2 * keys + 3 * config["intermediate_size"])
    head = config["vocab_size"] * hidden / layer
    layers: int = config["num_hidden_layers"]
    if stages == 1:
        return [layers]
    others = stages - 1
    tail = min(
        range(1, layers - others + 1),
        key=lambda tail: (max(tail + head, -(-(layers - tail) // others)), -tail),
    )
    return [(layers - tail) // others + (rank < (layers - tail) % others) for rank in range(others)] + [tail]


def handshake(ranks: tuple[int, int]) -> tuple[SessionKeys, SessionKeys]:
    """Both ends of a fresh handshake for the link that leads from one rank to another."""
    signers = (SoftwareSigner.generate(), SoftwareSigner.generate())
    ids = [member_id(signer.public_key) for signer in signers]

    def params(own: int) -> LinkParams:
        peer = signers[1 - own].public_key
        return LinkParams(
            "bench", "ring-0", 1, *ranks, ranks[own], 1, bytes(32), ids[own], ids[1 - own], peer, (SUITE,)
        )

    low, high = sorted((0, 1), key=lambda end: ranks[end])
    initiator = Initiator(params(low), signers[low])
    responder = Responder(params(high), signers[high], EphemeralLedger())
    turns = itertools.cycle((responder, initiator))
    message: bytes | None = initiator.start()
    keys: dict[object, SessionKeys] = {}
    while message is not None:
        turn = next(turns)
        answer = turn.on_message(message)
        message = answer.message
        if answer.session is not None:
            keys[turn] = answer.session
    ends = (keys[initiator], keys[responder])
    return ends if low == 0 else ends[::-1]


@dataclass
class Member:
    """An engine process, as its daemon sees it."""

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

    def __init__(
        self, options: argparse.Namespace, config: dict[str, Any], stages: int, stack: ExitStack
    ) -> None:
        self._options, self._config = options, config
        self.split = split_layers(config, stages)
        self.size = len(self.split)
        self._traces = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._epoch = 0
        bounds = list(itertools.pairwise([0, *itertools.accumulate(self.split)]))
        self._lows = [lo for lo, _ in bounds]
        self._members = [
            stack.enter_context(self._engine(rank, lo, hi)) for rank, (lo, hi) in enumerate(bounds)
        ]

    def wait_loaded(self) -> None:
        for member in self._members:
            member.event("ready")

    @contextmanager
    def _engine(self, rank: int, lo: int, hi: int) -> Iterator[Member]:
        near, far = socket.socketpair()
        command = ["-m", "bench.ring_engine", "--config", json.dumps(self._config), "--lo", str(lo)]
        command += ["--hi", str(hi), "--traces", str(self._traces), "--handoff-fd", str(far.fileno())]
        environment = device_environment(self._options.gpus, rank)
        with near, self._process(rank, command, [far.fileno()], environment) as frames:
            far.close()
            yield Member(frames, near)

    @contextmanager
    def _process(
        self, rank: int, command: list[str], descriptors: list[int], environment: dict[str, str]
    ) -> Iterator[FrameSocket]:
        """An engine or a carrier; what it and we say to each other."""
        ours, theirs = socket.socketpair()
        with closing(FrameSocket(ours)) as frames:
            command = [*command, "--control-fd", str(theirs.fileno())]
            descriptors = [theirs.fileno(), *descriptors]
            with started(command, pass_fds=descriptors, env=os.environ | environment) as process:
                theirs.close()
                if cores := self._options.cores:
                    pin(process.pid, [cores[rank % len(cores)]])
                yield frames

    def run(self, work: Callable[[Gateway], T], rows: int, sealed: bool = True) -> tuple[T, list[Any]]:
        """One epoch of at most `rows` rows: what `work` makes of it, and what each engine left behind."""
        self._epoch += 1
        with ExitStack() as stack:
            ends = [create_channel() for _ in range(self.size)] if self.size > 1 else []
            if ends:
                self._form(stack, ends, sealed)
            for rank, member in enumerate(self._members):
                opening = engine.OpenEngineEpoch(
                    id=self._epoch,
                    epoch=self._epoch,
                    rank=rank,
                    size=self.size,
                    prefill_chunk=LONGEST_CHUNK,
                    max_rows=rows,
                    kv_budget=1 << 60,
                )
                member.send(open_epoch=opening)
                if ends:
                    socket.send_fds(member.handoff, [str(self._epoch).encode()], list(ends[rank].engine))
                member.event("epoch_opened")
            for descriptor in itertools.chain(*(end.engine for end in ends)):
                os.close(descriptor)
            found = work(Gateway(self._members))
            for member in self._members:
                member.send(close_epoch=engine.CloseEngineEpoch(id=self._epoch))
                member.event("epoch_closed")
        return found, [
            json.loads((self._traces / f"{self._epoch}-{lo}.json").read_text()) for lo in self._lows
        ]

    def _form(self, stack: ExitStack, ends: list[ChannelEnds], sealed: bool) -> None:
        links = [handshake((rank, (rank + 1) % self.size)) for rank in range(self.size)]
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
                outgoing_keys=links[rank][0].to_carrier(),
                incoming_keys=links[rank - 1][1].to_carrier(),
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
        command = ["-m", "sealring.node.carrier.main" if sealed else "bench.ring_carrier"]
        command += ["--listen-fd", str(listener.fileno())]
        command += ["--channel-fds", ",".join(map(str, ends.carrier))]
        path = self._options.carrier_path
        environment = {"PYTHONPATH": f"{path}:{ROOT}", "LD_LIBRARY_PATH": ""} if path else {}
        with self._process(rank, command, [*ends.carrier, listener.fileno()], environment) as frames:
            listener.close()
            for descriptor in ends.carrier:
                os.close(descriptor)
            yield frames


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


def device_environment(gpus: int, rank: int) -> dict[str, str]:
    """Additional environment of a computing process: one GPU each, in turn."""
    return {"CUDA_VISIBLE_DEVICES": str(rank % gpus)} if gpus else {}
