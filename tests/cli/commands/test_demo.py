"""`sealring demo`; what it shows is in `tests/cli/transcripts`."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.mesh.errors import Unavailable


@pytest.mark.parametrize(("length", "status"), [(0, 2), (1, 10), (4096, 10), (4097, 2)])
def test_a_question_is_so_long_at_most(here: Any, host: Any, length: int, status: int) -> None:
    def make(*_: Any, **__: Any) -> Any:
        raise Unavailable("a cluster is made")

    host.machine = make
    assert here("demo", "--once", "--question", "x" * length).status == status
