"""A node daemon whose engine takes long for some steps: `python slow_node.py ARGUMENTS`, as `sealring`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sealring.node.daemon import engine_process as daemon_engine
from sealring.node.daemon.supervisor import Child

ENGINE = Path(__file__).with_name("slow_engine.py")
GENUINE = ["-m", daemon_engine.ENGINE_MODULE]


class SlowChild(Child):
    @classmethod
    async def spawn(cls, name: str, arguments: Sequence[str], **options: Any) -> Child:
        if list(arguments[:2]) == GENUINE:
            arguments = [str(ENGINE), *arguments[2:]]
        return await super().spawn(name, arguments, **options)


if __name__ == "__main__":
    daemon_engine.Child = SlowChild  # type: ignore[misc]
    from sealring.cli.__main__ import main

    sys.argv = ["sealring", *sys.argv[1:]]
    main()
