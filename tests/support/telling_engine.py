"""The engine, which keeps the parameter records that come to it in a file of the temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from sealring.mesh.ring import Chunk
from sealring.node.engine import main
from sealring.node.engine.seats.sources import Neighbour

_genuine = Neighbour.begin


def told(process: int) -> Path:
    """The file of an engine."""
    return Path(psutil.Process(process).environ()["TMPDIR"], f"records-{process}")


def _tell(self: Neighbour, chunk: Chunk) -> bytes:
    record = _genuine(self, chunk)
    with told(os.getpid()).open("ab") as file:
        file.write(record)
    return record


if __name__ == "__main__":
    Neighbour.begin = _tell  # type: ignore[method-assign]
    main.main()
