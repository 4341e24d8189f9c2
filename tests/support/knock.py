"""The daemon's part when a carrier forms its group: somebody has to connect to MLX."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator


@contextlib.contextmanager
def knocking(port: int, seconds: float = 200) -> Iterator[None]:
    """A visitor at a port of loopback, from when somebody listens there; until then macOS gives no answer."""
    until = time.monotonic() + seconds
    while True:
        try:
            visitor = socket.create_connection(("127.0.0.1", port), timeout=0.1)
            break
        except (ConnectionRefusedError, TimeoutError):
            if time.monotonic() > until:
                raise
            time.sleep(0.005)
    with visitor:
        yield
