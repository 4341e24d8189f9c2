"""A Mac's waits outside its kernels, old against new by turns: caches that grow, weights read, long records.

Caches: one layer's keys and values get token after token behind a long prompt, grown by 256 tokens or by
`rows.growth`. Weights: a safetensors file is read in blocks of 8 MiB, after each of which MLX's freed buffers
go back, or as `device.read_bytes` has it. Records: two ends of a TCP connection have socket buffers of 128
KiB, as a new connection of macOS has, or of 4 MiB. MLX computes on its default device; a CPU is not Metal.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.frame import Result, Table
from bench.verdict import Check, ratios

QUICK = ("--rounds", "1", "--tokens", "512", "--megabytes", "64", "--records", "20")

_OLD_STEP, _OLD_BLOCK, _OLD_SOCKET = 256, 8 << 20, 128 << 10
_RECORD = 1 << 20


def run(options: argparse.Namespace) -> Result:
    """Milliseconds by what was measured, of the old and of the new way, round by round."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="sealring-bench-") as folder:
        file = _weights(Path(folder), options.megabytes)
        parts: dict[str, Callable[[bool], float]] = {
            f"{options.tokens} tokens behind {options.context}": lambda new: _caches(options, new),
            f"{options.megabytes} MB of weights": lambda new: _reads(file, new),
            f"{options.records} records of 1 MiB": lambda new: _records(options.records, new),
        }
        for name, measured in parts.items():
            ways: dict[str, list[float]] = {"old": [], "new": []}
            for number in range(options.rounds):
                for way in ("old", "new") if number % 2 else ("new", "old"):
                    ways[way].append(round(measured(way == "new") * 1e3, 1))
            found[name] = ways
    return {"parts": found}


def _caches(options: argparse.Namespace, new: bool) -> float:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    from sealring.node.engine.caches.plain import growth

    class Measured(KVCache):  # type: ignore[misc]
        step = property(lambda self: growth(self.offset) if new else _OLD_STEP)

    cache, shape = Measured(), (1, options.heads, 1, 128)
    long = mx.zeros((1, options.heads, options.context, 128), mx.float16)
    mx.eval(cache.update_and_fetch(long, long))
    token = mx.zeros(shape, mx.float16)
    begun = time.perf_counter()
    for _ in range(options.tokens):
        cache.update_and_fetch(token, token)
        mx.eval(cache.keys, cache.values)
    return time.perf_counter() - begun


def _weights(folder: Path, megabytes: int) -> Path:
    import mlx.core as mx

    file = folder / "weights.safetensors"
    each = 4 << 20
    mx.save_safetensors(
        str(file), {str(number): mx.random.normal((each // 4,)) for number in range(megabytes // 4)}
    )
    return file


def _reads(file: Path, new: bool) -> float:
    import mlx.core as mx

    from sealring.node.engine import device

    most = device.read_bytes() if new else _OLD_BLOCK
    arrays: dict[str, Any] = mx.load(str(file))  # type: ignore[assignment]
    begun, block = time.perf_counter(), []
    for array in arrays.values():
        block.append(array)
        if sum(one.nbytes for one in block) >= most:
            mx.eval(block)
            block.clear()
            if not new:
                mx.clear_cache()
    mx.eval(block)
    mx.clear_cache()
    return time.perf_counter() - begun


def _records(records: int, new: bool) -> float:
    from sealring.node.carrier.ways import SOCKET_BYTES

    size = SOCKET_BYTES if new else _OLD_SOCKET

    def sized(one: socket.socket) -> socket.socket:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, option, size)
        return one

    with sized(socket.socket()) as server, sized(socket.socket()) as sending:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        sending.connect(server.getsockname())
        receiving, _ = server.accept()
        record = bytes(_RECORD)
        answer = threading.Thread(target=_answer, args=(receiving, records))
        answer.start()
        begun = time.perf_counter()
        for _ in range(records):
            sending.sendall(record)
            sending.recv(1)
        took = time.perf_counter() - begun
        answer.join()
        receiving.close()
    return took


def _answer(receiving: socket.socket, records: int) -> None:
    memory = memoryview(bytearray(_RECORD))
    for _ in range(records):
        rest = memory
        while rest:
            rest = rest[receiving.recv_into(rest) :]
        receiving.sendall(b"x")


def tables(result: Result) -> list[Table]:
    rows = [
        [name, *(" ".join(map(str, ways[way])) for way in ways)] for name, ways in result["parts"].items()
    ]
    return [Table("ms, round by round", ["what", "old", "new"], rows)]


def checks(result: Result) -> list[Check]:
    return [
        Check(f"{name}, new / old", [one or 0.0 for one in ratios(ways["new"], ways["old"])], 1.0)
        for name, ways in result["parts"].items()
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=16_384, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens behind it")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=512, help="of weights")
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
