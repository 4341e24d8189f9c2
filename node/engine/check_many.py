"""Checks many configurations, each with random weights.

`python -m sealring.node.engine.check_many FILE OPTIONS KEY...` prints a line of JSON for each key.
OPTIONS are JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from sealring.mesh.errors import ModelError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.apart import answers
from sealring.node.engine.check import check, read_configurations
from sealring.node.engine.check_report import abilities


def outcome(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The outcome of `check` (`exact`, `wrong` or `refused`), and `abilities`. Raises InvalidInput."""
    found: dict[str, Any] = {"model_type": config["model_type"]}
    try:
        report = check(config, **options)
    except ModelError as error:
        return found | {"outcome": "refused", "reason": error.reason, "why": error.message}
    done = {"outcome": "exact" if report.right else "wrong", "stages": len(report.stages)}
    return found | done | abilities(config)


def main() -> int:
    forbid_core_files()
    file, options, *keys = sys.argv[1:]
    configurations = read_configurations(file)
    return answers(partial(outcome, configurations[key], **json.loads(options)) for key in keys)


if __name__ == "__main__":
    sys.exit(main())
