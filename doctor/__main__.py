"""`python -m sealring.doctor`: one report on standard output, for the daemon that asks on standard input.

The input is JSON: the daemon's settings, and in hex a DiagnoseResponse with the daemon's findings.
"""

from __future__ import annotations

from sealring.mesh.system.start import collect_seldom, hide_rich

if __name__ == "__main__":
    hide_rich()  # before structlog
    collect_seldom()

import json
import sys

from sealring.doctor.daemon import with_daemon
from sealring.doctor.local import examine
from sealring.doctor.report import encode
from sealring.doctor.system import System
from sealring.doctor.view import read_view
from sealring.mesh.system.start import forbid_core_files
from sealring.node.settings import NodeSettings
from sealring.v1 import diagnosis_pb2

_MAX_INPUT = 1 << 20


def main() -> None:
    """Raises whatever is wrong with the input: it is the daemon's."""
    forbid_core_files()
    asked = json.loads(sys.stdin.buffer.read(_MAX_INPUT))
    told = diagnosis_pb2.DiagnoseResponse.FromString(bytes.fromhex(asked["daemon"]))
    view = with_daemon(read_view(NodeSettings.model_validate(asked["settings"])), told)
    sys.stdout.buffer.write(encode(examine(System(), view)))


if __name__ == "__main__":
    main()
