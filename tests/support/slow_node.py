"""A node daemon whose engine takes long for some steps: `python slow_node.py ARGUMENTS`, as `sealring`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sealring.node.daemon.engine_process import ENGINE_MODULE, EngineProcess
from sealring.node.daemon.supervisor import Child

ENGINE = Path(__file__).with_name("slow_engine.py")
start = EngineProcess.start.__func__  # type: ignore[attr-defined]


async def spawn_slow(name: str, arguments: Sequence[str], **options: Any) -> Child:
    assert list(arguments[:2]) == ["-m", ENGINE_MODULE]
    return await Child.spawn(name, [str(ENGINE), *arguments[2:]], **options)


async def start_slow(cls: type[EngineProcess], **options: Any) -> EngineProcess:
    started: EngineProcess = await start(cls, **(options | {"spawn": spawn_slow}))
    return started


if __name__ == "__main__":
    EngineProcess.start = classmethod(start_slow)  # type: ignore[method-assign, assignment]
    from sealring.cli.__main__ import main

    sys.argv = ["sealring", *sys.argv[1:]]
    main()
