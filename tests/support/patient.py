"""`sealring` whose gateway waits for prefixes on disk until they are read: `python patient.py ARGUMENTS`.

A prompt waits for its members' disks for a second, or as long as prefill would take. On a busy machine they
take longer now and then, and the prefix is computed.
"""

from __future__ import annotations

import sys

import hasty

SECONDS = 100.0

if __name__ == "__main__":
    if "gateway" in sys.argv:
        from sealring.mesh.system.start import collect_seldom, hide_rich

        collect_seldom()
        hide_rich()  # as the command does before its imports
        from sealring.gateway.scheduler import recalls

        recalls.LEAST_SECONDS = SECONDS
    hasty.main()
