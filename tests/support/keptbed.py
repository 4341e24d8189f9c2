"""Marks of tests on daemons that a module's tests share (`kept_bed` in tests/node/daemon/conftest.py)."""

from typing import Any

import pytest


def on(nodes: int) -> Any:
    """A test on the kept bed with this number of nodes."""
    loop = pytest.mark.asyncio(loop_scope="module")
    bed = pytest.mark.parametrize("_kept_bed", [nodes], indirect=True, scope="module")
    return lambda test: loop(bed(test))


on_one, on_two = on(1), on(2)
