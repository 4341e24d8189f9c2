"""Fetches one model from the Hugging Face hub into its cache: a process of its own, started by the daemon.

`python -m sealring.node.models.fetch --control-fd N ORG/NAME`. Exit status 0 when all of it is there. The
end of the control socket, and so of the daemon, ends it. Python files are never fetched: no code comes with
a model.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading

import structlog

from sealring.mesh.system import logging
from sealring.mesh.system.coredumps import forbid_core_files

log = structlog.get_logger()

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def main() -> None:
    """Fetches the model that the command line names."""
    forbid_core_files()
    parser = argparse.ArgumentParser(
        prog="python -m sealring.node.models.fetch", description="started by the node daemon"
    )
    parser.add_argument("model")
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.configure("fetch")
    threading.Thread(target=_die_with_daemon, args=(arguments.control_fd,), daemon=True).start()
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(arguments.model, allow_patterns=PATTERNS)
    except Exception as error:
        log.error("model_not_fetched", exc_info=error)
        sys.exit(1)


def _die_with_daemon(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as control:
        control.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
