"""All that a simulated cluster knows of the world, from one source: randomness, clocks, and the computer.

Two runs of a seed are alike to the last callback, on whatever machine and whenever. `take` has to come before
the product is imported, for some modules keep a function's name.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import nacl.signing
import psutil  # type: ignore[import-untyped]
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

BEGINNING = 1_790_000_000.0
"""What the machines' clocks show first, in seconds since 1970."""

_MEMORY = 1 << 36
_ORDER = 1 << 255  # a little below that of P-256

source = random.Random()


def take() -> None:
    """Has everything random come from `source`, and every clock from the running loop."""
    os.urandom = random._urandom = source.randbytes  # type: ignore[attr-defined]  # noqa: SLF001 - `secrets`
    nacl.signing.random = source.randbytes  # type: ignore[attr-defined]
    ec.generate_private_key = lambda curve, backend=None: ec.derive_private_key(
        source.randrange(1, _ORDER), curve
    )
    X25519PrivateKey.generate = lambda: X25519PrivateKey.from_private_bytes(source.randbytes(32))  # type: ignore[method-assign]
    MLKEM768PrivateKey.generate = lambda: MLKEM768PrivateKey.from_seed_bytes(source.randbytes(64))  # type: ignore[method-assign]
    # A signature's length depends on its nonce, and so does when a window of flow control is full.
    begin = ec.ECDSA.__init__
    ec.ECDSA.__init__ = lambda self, algorithm, *_, **__: begin(self, algorithm, deterministic_signing=True)  # type: ignore[method-assign]
    time.monotonic, time.perf_counter = _of_loop(time.monotonic), _of_loop(time.perf_counter)
    time.time = _of_loop(time.time, BEGINNING)
    psutil.virtual_memory = lambda: SimpleNamespace(total=_MEMORY, available=_MEMORY)
    psutil.net_if_addrs = psutil.net_if_stats = dict


def _of_loop(real: Callable[[], float], zero: float = 0.0) -> Callable[[], float]:
    def clock() -> float:
        loop = asyncio._get_running_loop()  # noqa: SLF001 - it raises nothing, and is quick
        return real() if loop is None else zero + loop.time()

    return clock


def seed(number: int) -> None:
    """Begins anew, for one seed."""
    source.seed(number)
    random.seed(number)
