"""The memory of the newest roster: damage to the file is damage, and never a second history."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.mesh.errors import RosterError
from sealring.mesh.roster import RosterStateFile
from sealring.mesh.roster.memory import RosterState


def test_every_bit_that_flips_is_found_and_the_file_is_named(tmp_path: Path) -> None:
    file = RosterStateFile(tmp_path / "roster-state.json")
    state = RosterState("demo", 1, 70, b"\x5a" * 32, 1_800_000_000)
    file.save(state)
    assert file.load() == state
    sound = file.path.read_bytes()
    for index in range(len(sound)):
        for bit in (0, 5):
            file.path.write_bytes(sound[:index] + bytes([sound[index] ^ 1 << bit]) + sound[index + 1 :])
            with pytest.raises(RosterError) as caught:
                file.load()
            assert caught.value.reason == "ROSTER_STATE_CORRUPT"
            assert str(file.path) in caught.value.message
