"""`sealring` whose coordinator forms a ring anew soon, however often it broke, and lets models on demand take
short turns: `python hasty.py ARGUMENTS`.

Tests break rings one after another, for which the back-off between epochs would have each of them wait. They
also ask for models by turns.
"""

from __future__ import annotations

import sys

from sealring.cli.__main__ import main as command
from sealring.mesh.system.start import collect_seldom, hide_rich

SECONDS = 0.5


def main() -> None:
    if "coordinator" in sys.argv:
        collect_seldom()
        hide_rich()  # as the command does before its imports
        from sealring.coordinator.rings import epochs, loads

        epochs.LAST_BACKOFF = loads.TURN_SECONDS = SECONDS
    sys.argv[0] = "sealring"
    command()


if __name__ == "__main__":
    main()
