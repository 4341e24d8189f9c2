"""The `sealring` command, also as `python -m sealring.cli`."""

from __future__ import annotations

import signal

from sealring.mesh.system.start import forbid_core_files


def main() -> None:
    """Runs the command. Ctrl-C ends it without a word while it is imported, where Python would show a
    traceback, or lose the interrupt in a callback of its own; later it is the command's."""
    forbid_core_files()
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as by nohup
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sealring.cli.main import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
