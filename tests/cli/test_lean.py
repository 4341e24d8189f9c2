"""What the `sealring` command's processes do without, and what they get when they need it."""

import subprocess
import sys

PROGRAM = """
import gc, sys
from sealring.mesh.system.start import hide_rich, show_rich
hide_rich()
import structlog
{then}
"""


def run(then: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout.splitlines()


def test_structlog_does_without_rich_and_a_table_has_it() -> None:
    code = """
hide_rich()
print(structlog.dev.rich, "rich.console" in sys.modules)
from sealring.cli.terminal.output import print_table
print_table(["name", "rows"], [["one", 1]])
print("rich.console" in sys.modules)
rich = sys.modules["rich"]
hide_rich()
show_rich()
print(sys.modules["rich"] is rich)
"""
    assert run(code) == ["None False", "name  rows", "one      1", "True", "True"]


def test_deferred_asyncio_is_whole_when_it_is_used() -> None:
    code = """
for name in [name for name in sys.modules if name.split(".")[0] in {"asyncio", "structlog"}]:
    del sys.modules[name]
from sealring.mesh.system.start import defer_asyncio
defer_asyncio()
import structlog
print("asyncio.events" in sys.modules)
import asyncio
async def work(): return hasattr(asyncio, "no such name")
print(asyncio.run(work()))
"""
    assert run(code) == ["False", "False"]
