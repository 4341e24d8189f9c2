"""Shared memory in slots: as much as it says, and nothing beside it."""

from __future__ import annotations

import errno
import os

import pytest

from sealring.mesh.errors import ResourceExhausted
from sealring.node.wire import arena
from sealring.node.wire.arena import ARENA_BYTES, SLOT_BYTES, SLOTS, Arena, create_arena


def test_slots_lie_beside_each_other_and_not_beyond() -> None:
    descriptor = create_arena()
    assert (os.fstat(descriptor).st_size, SLOTS, SLOT_BYTES) == (ARENA_BYTES, 6, (16 << 20) + 4096)
    assert not os.get_inheritable(descriptor)
    made = Arena(descriptor)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    for index in (0, SLOTS - 1):
        slot = made.slot(index, SLOT_BYTES)
        slot[0], slot[-1] = index + 1, index + 2
        slot.release()
    assert len(made.slot(1, 0)) == 0
    with made.slot(0, 1) as first, made.slot(SLOTS - 2, SLOT_BYTES) as beside:
        assert (first[0], beside[-1]) == (1, 0)
    for index, length in ((-1, 1), (SLOTS, 1), (0, -1), (0, SLOT_BYTES + 1)):
        with pytest.raises(ValueError, match="outside the arena"):
            made.slot(index, length)
    held = made.slot(0, 1)
    made.close()
    assert held[0] == 1, "it stays for who holds a slot"
    held.release()
    made.close()
    with pytest.raises(ValueError, match="released"):
        made.slot(0, 1)


def test_a_system_without_memory_to_share_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(arena, "_anonymous_descriptor", full)
    with pytest.raises(ResourceExhausted, match="too many open files") as raised:
        create_arena()
    assert raised.value.reason == "NO_SHARED_MEMORY"
