"""One end of a link between two namespaces: `python ringways.py listen|call PASS ...`, for test_ways.py."""

from __future__ import annotations

import sys
import threading
import time

from sealring.node.carrier.neighbours import PASS_BYTES, Reception, listen
from sealring.node.carrier.ways import Way, measure, probe_tag

SECONDS = 60.0


def main() -> None:
    what, *hosts = sys.argv[1:]
    link_pass = bytes(range(PASS_BYTES))
    if what == "listen":
        listener = listen("0.0.0.0", 16)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        reception = Reception(listener, link_pass, lambda record: None)
        threading.Thread(
            target=reception.run, args=(time.monotonic() + SECONDS, lambda: True), daemon=True
        ).start()
        sys.stdin.read()
        return
    port, *rest = hosts
    ways = [Way((host, int(port)), source) for host, source in zip(rest[::2], rest[1::2], strict=True)]
    for one in measure(ways, probe_tag(link_pass), lambda: time.monotonic() + SECONDS):
        sys.stdout.write(f"{one.way.address[0]} {one.rate:.0f} {one.round_trip}\n")


if __name__ == "__main__":
    main()
