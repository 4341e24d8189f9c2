"""One rank of a tensor group as a process of its own, for MLX has one group a process.

`python tensor_rank.py RANK RANKS IN OUT FAMILY...` with MLX_RANK and MLX_HOSTFILE set; IN and OUT are the
descriptors of the links from the rank before and to the one after. Prints what the head delivered.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from functools import partial

import mlx.core as mx
from patience import PATIENCE_SECONDS
from schedules import make_steps
from stagering import (
    CHUNK,
    MAX_ROWS,
    SEED,
    MemoryReceived,
    Prompts,
    config_of,
    prefixes_of,
    prompt_of,
)

from sealring.mesh.errors import EpochEnded
from sealring.mesh.ring import Composition
from sealring.node.engine import Allowance, RowParameters, StageEpoch, compute_in_batches, params, seat_of
from sealring.node.engine.seats import results
from sealring.node.engine.staging import Shard, random_model
from sealring.node.engine.warm_up import warm_up
from sealring.node.wire.channel import RecordHeader
from sealring.v1 import control_pb2 as control


class SocketChannel:
    """As node.wire.channel.EngineChannel, and as strict about what was announced."""

    def __init__(self, incoming: Any, outgoing: Any) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._expected: deque[RecordHeader] = deque()

    def send(self, header: RecordHeader, *buffers: memoryview | bytes) -> None:
        payload = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        pickle.dump((header, payload), self._outgoing)
        self._outgoing.flush()

    def expect(self, header: RecordHeader) -> None:
        self._expected.append(header)

    def receive(self, timeout: float | None = None) -> MemoryReceived:
        try:
            header, payload = pickle.load(self._incoming)
        except EOFError:
            raise EpochEnded("the other rank has gone") from None
        assert header == self._expected.popleft()
        return MemoryReceived(header, payload)

    def shut(self) -> None: ...

    def close(self) -> None: ...


def work_of(family: str) -> tuple[list[control.Step], dict[int, tuple[list[int], RowParameters]]]:
    """Rows that are greedy, sampled and told the log-probabilities of their prompt, in two lanes.

    Of few tokens: a rank that waits for another in MLX's ring backend keeps a processor busy.
    """
    lengths = {1: (3, 3), 2: (17, 2), 3: (9, 3), 4: (9, 2)}
    prompts = {row: prompt_of(family, row, length) for row, (length, _) in lengths.items()}
    parameters = {
        1: RowParameters(),
        2: RowParameters(),
        3: RowParameters(temperature=0.8, top_p=0.9, seed=5),
        4: RowParameters(logprobs=1, scored=tuple(prompts[4])),
    }
    sizes = {row: len(params.encode(one)) for row, one in parameters.items()}
    steps = make_steps(random.Random(1), lengths, 2, sizes=sizes)
    return steps, {row: (prompts[row], parameters[row]) for row in lengths}


launch = results.launch


def launch_and_lose_the_processor(prompts: Prompts, *arrays: object) -> None:
    """Launches, and lets the tail's tokens arrive before the compute loop does anything else."""
    delivered = len(prompts.steps)
    launch(*arrays)
    with prompts.delivered:
        prompts.delivered.wait_for(lambda: len(prompts.steps) > delivered, 0.05)


def answers(family: str, rank: int, ranks: int, group: Any, channel: SocketChannel) -> dict[int, list[int]]:
    config = config_of(family)
    stage = Shard(random_model(config, seed=SEED), rank, ranks, config["model_type"])
    mx.eval(stage.kept)
    warm_up(stage, 512)
    stage.join(group)
    steps, rows = work_of(family)
    prompts = Prompts(rows)
    if rank == 0:
        results.launch = partial(launch_and_lose_the_processor, prompts)
    faults: list[BaseException] = []
    epoch = StageEpoch(
        1,
        Composition(epoch=1, max_rows=MAX_ROWS, prefill_chunk=CHUNK),
        stage,
        partial(
            seat_of,
            stage,
            channel=channel,  # type: ignore[arg-type]
            prompts=prompts if rank == 0 else None,
        ),
        allowance=Allowance(1, 1, 1 << 40),
        prefixes=prefixes_of(stage),
        on_fault=faults.append,
    )
    resolved = [epoch.announce(step) for step in steps]
    for step in resolved:
        assert step is not None, faults
        epoch.execute(step)
    last = max(step.number for step in resolved if step is not None and step.sampled)
    if rank == 0:
        with prompts.delivered:
            assert prompts.delivered.wait_for(lambda: faults or last in prompts.steps, PATIENCE_SECONDS)
    assert not faults, faults
    return prompts.answers  # the epoch is left as it is, for it may still have tokens to pass on


def main() -> None:
    mx.disable_compile()  # as in the tests beside it
    rank, ranks, incoming, outgoing = map(int, sys.argv[1:5])
    compute_in_batches()
    mx.distributed.init()  # of one, as in an engine that loads before its group is formed
    group = mx.distributed.init(strict=True, backend="ring")
    links = [socket.socket(fileno=each) for each in (incoming, outgoing)]
    channel = SocketChannel(links[0].makefile("rb"), links[1].makefile("wb"))
    told = [answers(family, rank, ranks, group, channel) for family in sys.argv[5:]]
    if rank:
        signal.pause()  # it may still have tokens to send; who started it ends it
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # MLX's threads may still wait for each other


if __name__ == "__main__":
    main()
