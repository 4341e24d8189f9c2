"""`sealring` whose coordinator forms a ring anew soon, however often it broke, and lets models on demand take
short turns; its gateway has requests give way at once: `python hasty.py ARGUMENTS`.

Tests break rings one after another, for which the back-off between epochs would have each of them wait. They
also ask for models by turns, and with several keys.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from sealring.cli.__main__ import main as command
from sealring.mesh.system.start import collect_seldom, hide_rich

SECONDS = 0.5
TOKENS = 4
"""Tokens that a choice has brought before it gives way."""


def main(engine: str = "") -> None:
    """`engine` is a module of this folder that a node runs in place of the engine's own."""
    if engine:
        from sealring.node.daemon import engine_process, supervisor

        environment = supervisor.child_environment
        found = {"PYTHONPATH": str(Path(__file__).parent)}
        supervisor.child_environment = lambda extra: environment({**extra, **found})
        engine_process.ENGINE_MODULE = engine
    if "coordinator" in sys.argv:
        collect_seldom()
        hide_rich()  # as the command does before its imports
        from sealring.coordinator.rings import epochs, loads

        epochs.LAST_BACKOFF = loads.TURN_SECONDS = SECONDS
    if "gateway" in sys.argv:
        giving = import_module("sealring.gateway.scheduler.giving")
        giving.PATIENCE, giving.LEAST = 0.0, TOKENS
    sys.argv[0] = "sealring"
    command()


if __name__ == "__main__":
    main()
