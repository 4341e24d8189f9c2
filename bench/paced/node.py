"""`sealring` whose nodes start the paced engine: `python node.py ARGUMENTS`, with the pace in PACE.

Coordinator, gateway and daemons are the product's. Only the program that a daemon starts as its engine is
another one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Plain = Mapping[str, Sequence[Sequence[float]]]

PACE = "BENCH_MACS_PACE"
"""The variable that holds a node's `Pace`, as JSON."""

ENGINE = Path(__file__).with_name("engine.py")


@dataclass(frozen=True)
class Pace:
    """What an engine is paced as. `slower` multiplies all of its times. `reports` is a folder.

    `shaped`: the network delays records itself. `records`: nothing is paced, and the times of steps are
    reported. `tables`: such times of "head" and "tail", as `timed.StepTimes.plain` has them, to go by if
    `machine` and `model` are "". `draft` is the head's draft model, if any. `namespaces`: each node has one
    of its own, `space`, if this machine allows that.
    """

    machine: str
    model: str
    link: str
    slower: float
    shaped: bool = False
    reports: str = ""
    records: bool = False
    namespaces: bool = False
    space: str = ""
    draft: str = ""
    tables: Mapping[str, Plain] = field(default_factory=dict)


def main() -> None:
    """Runs the command with the paced engine."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # Python's -P leaves it out
    from bench.paced.network import enter
    from sealring.cli.__main__ import main as command
    from sealring.node.daemon.engine_process import ENGINE_MODULE, EngineProcess
    from sealring.node.daemon.supervisor import Child

    pace = os.environ.get(PACE, "")
    if pace and (space := json.loads(pace).get("space")):
        enter(space)
    start = EngineProcess.start.__func__  # type: ignore[attr-defined]

    async def spawn(name: str, arguments: Sequence[str], **options: Any) -> Child:
        """The engine's process, by the path of the paced one."""
        assert list(arguments[:2]) == ["-m", ENGINE_MODULE]
        return await Child.spawn(name, [str(ENGINE), *arguments[2:], "--pace", pace], **options)

    async def started(cls: type[EngineProcess], **options: Any) -> EngineProcess:
        made: EngineProcess = await start(cls, **(options | {"spawn": spawn}))
        return made

    EngineProcess.start = classmethod(started)  # type: ignore[method-assign, assignment]
    sys.argv = ["sealring", *sys.argv[1:]]
    command()


if __name__ == "__main__":
    main()
