"""Checks every configuration of a file: three stages against the whole model, with random weights.

`python -m bench.stages FILE.json > found.json`. A configuration whose code crashes the process fails alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sealring.mesh.errors import Internal, ModelError
from sealring.node.engine.apart import EXACT, crash

CHECK = "sealring.node.engine.check_many"
OPTIONS = {"stages": 3}


def ask_each_apart(
    module: str, arguments: Sequence[str], keys: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any] | ModelError]]:
    """The answer of `python -m module arguments keys` to each key, or the crash that it caused.

    A new process follows each crash. Raises Internal for another failure.
    """
    waiting = list(keys)
    while waiting:
        command = [sys.executable, "-P", "-m", module, *arguments, *waiting]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | EXACT,
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                yield waiting.pop(0), json.loads(line)
        if process.returncode < 0 and waiting:
            yield waiting.pop(0), crash(process.returncode)
        elif waiting:
            raise Internal(f"the check of {waiting[0]} failed")


def main(arguments: Sequence[str]) -> None:
    file = Path(arguments[0])
    keys = list(json.loads(file.read_bytes()))
    found: dict[str, Any] = {}
    for key, answer in ask_each_apart(CHECK, [str(file), json.dumps(OPTIONS)], keys):
        if isinstance(answer, ModelError):
            answer = {"outcome": "refused", "reason": answer.reason, "why": answer.message}
        found[key] = answer
    sys.stdout.write(json.dumps(found))
    if wrong := [key for key, one in found.items() if one["outcome"] == "wrong"]:
        sys.exit(f"not what the whole model computes: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
