"""`sealring node` and `sealring gateway` on their own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.system.lock import lock_state


def test_the_nonce_is_that_of_the_identity(here: Any, home: Path) -> None:
    printed = here("node", "nonce", "--state-dir", str(home)).out.strip()
    assert len(bytes.fromhex(printed)) == 32
    assert here("node", "nonce", "--state-dir", str(home), "--json").data == {"nonce": printed}


@pytest.mark.parametrize("role", ["node", "gateway"])
def test_who_runs_does_not_leave(here: Any, home: Path, role: str) -> None:
    (home / "member.json").write_text("{}")
    with lock_state(home):
        assert "[STATE_IN_USE]" in here(role, "leave", "--state-dir", str(home)).err
    assert (home / "member.json").exists()
