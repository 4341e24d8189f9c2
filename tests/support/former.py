"""`sealring` of an earlier commit, whose files are in a folder: `python former.py FOLDER ARGUMENTS`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMIT = "4c9b52ca"
"""The last whose machines speak no protocol but 12."""


def unpack(folder: Path) -> tuple[str, str, str]:
    """Puts the commit's files there, and returns the command that runs them."""
    top = Path(__file__).parents[2]
    packed = subprocess.run(["git", "-C", str(top), "archive", COMMIT], capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"this clone lacks commit {COMMIT}")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return sys.executable, __file__, str(folder)


def main() -> None:
    folder = sys.argv.pop(1)
    sys.path[:0] = [folder, f"{folder}/tests/support"]
    if "node" in sys.argv:
        from sealring.node.daemon import supervisor

        environment = supervisor.child_environment
        supervisor.child_environment = lambda extra: environment({**extra, "PYTHONPATH": folder})
    import hasty

    hasty.main()


if __name__ == "__main__":
    main()
