"""What is counted: by day, before and after a restart, while the disk takes nothing."""

from __future__ import annotations

import datetime
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import structlog

from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.access.quota import day_of
from sealring.gateway.usage import store
from sealring.gateway.usage import usage as usage_module
from sealring.gateway.usage.store import Place, UsageStore, Used
from sealring.gateway.usage.usage import Usage
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.testing import ManualClock
from sealring.v1 import inference_pb2 as inference

NOON = datetime.datetime(2026, 11, 30, 12).timestamp()
DAY = 86_400


class Disk(UsageStore):
    """One that can be full."""

    full = False

    def add(self, new: Any, names: Any = None) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        super().add(new, names)

    def read(self, *arguments: Any) -> dict[Place, Used]:
        if self.full:
            raise OSError("disk I/O error")
        return super().read(*arguments)


def asked(since: str = "") -> inference.GetUsageRequest:
    return inference.GetUsageRequest(since=since)


async def test_a_quota_counts_what_was_computed_today(tmp_path: Path) -> None:
    clock = ManualClock(NOON)
    counted = Usage(Disk(tmp_path), clock=clock)
    counted.add("laptop", "qwen", Used(1, prompt=100, cached=60, answered=5))
    counted.add("laptop", "llama", Used(1, prompt=10, answered=1))
    counted.add("", "qwen", Used(1, prompt=7))
    assert [counted.spent(key) for key in ("laptop", "", "other")] == [56, 7, 0]
    await counted.flush()
    again = Usage(Disk(tmp_path), clock=clock)
    assert (again.spent("laptop"), again.spent("")) == (56, 7)
    again.add("laptop", "qwen", Used(1, prompt=1))
    assert again.spent("laptop") == 57
    clock.now += DAY
    assert again.spent("laptop") == 0
    clock.now -= DAY  # it was wrong: what is not written yet counts as well
    assert again.spent("laptop") == 1
    await again.flush()
    assert again.spent("laptop") == 57


async def test_a_quota_counts_what_could_not_be_read_at_the_start(tmp_path: Path) -> None:
    disk, clock = Disk(tmp_path), ManualClock(NOON)
    counted = Usage(disk, clock=clock)
    counted.add("laptop", "qwen", Used(1, prompt=100))
    await counted.flush()
    disk.full = True
    again = Usage(disk, clock=clock)
    again.add("laptop", "qwen", Used(1, prompt=7))
    await again.flush()
    assert again.spent("laptop") == 7
    disk.full = False
    for _ in range(2):
        await again.flush()
        assert again.spent("laptop") == 107
    assert sum(used.prompt for used in Disk(tmp_path).read().values()) == 107


async def test_a_full_disk_loses_nothing_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "_MOST_WAITING", 3)
    disk, clock = Disk(tmp_path), ManualClock(NOON)
    counted = Usage(disk, clock=clock)
    disk.full = True
    with structlog.testing.capture_logs() as logs:
        for number in range(9):
            counted.add(f"key-{number}", "m", Used(1, prompt=10))
            await counted.flush()
        with pytest.raises(Unavailable) as caught:
            await counted.tell(asked(), [])
    assert caught.value.reason == "USAGE_UNREADABLE"
    assert [one["event"] for one in logs] == ["usage_not_written"]
    assert counted.spent("key-8") == 10
    disk.full = False
    told = await counted.tell(asked(), [])
    assert sum(one.prompt_tokens for one in told.usage) == 90
    assert [one.key for one in told.usage] == ["", "key-0", "key-1", "key-2"]
    assert len(Disk(tmp_path).read()) == 4


async def test_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, clock = KeyFile(tmp_path, clock=lambda: NOON), ManualClock(NOON)
    _, laptop = keys.create([Scope.INFERENCE], label="laptop", tokens_a_day=100)
    _, gone = keys.create([Scope.INFERENCE], label="gone")
    _, former = keys.create([Scope.INFERENCE], label="former")
    for one in (gone, former):
        keys.revoke(one.id)
    counted = Usage(Disk(tmp_path), clock=clock)
    counted.add(former.id, "m", Used(1, prompt=5, answered=2, ring_ms=40))
    clock.now += DAY
    counted.add(laptop.id, "m", Used(1, prompt=5, cached=4, answered=3))
    told = await counted.tell(asked(), keys.read().values())
    assert [(one.day, one.key, one.answered_tokens) for one in told.usage] == [
        ("2026-12-01", laptop.id, 3),
        ("2026-11-30", former.id, 2),
    ]
    assert told.usage[1].ring_ms == 40
    assert (told.today, told.more) == ("2026-12-01", False)
    assert {one.label: (one.tokens_a_day, one.tokens_today) for one in told.keys} == {
        "laptop": (100, 4),
        "former": (0, 0),
    }
    assert [one.key for one in (await counted.tell(asked("2026-12-01"), [])).usage] == [laptop.id]
    monkeypatch.setattr(usage_module, "MOST_SHOWN", 1)
    assert (await counted.tell(asked(), [])).more
    for wrong in ("yesterday", "2026-11-30'", "2" * 999):
        with pytest.raises(InvalidInput):
            await counted.tell(asked(wrong), [])


async def test_a_machine_has_its_name_also_after_it_was_evicted(tmp_path: Path) -> None:
    """Its last name of when it asked, for as long as anything that it used is kept."""
    clock, roster, disk = ManualClock(NOON), {"abcd": "mini", "efgh": "studio"}, Disk(tmp_path)
    counted = Usage(disk, lambda key: roster.get(key, ""), clock=clock)
    counted.add("abcd", "m", Used(1, prompt=5))
    (told,) = counted.collect()
    assert [one.labels for one in told.samples] == [{"key": "abcd", "name": "mini"}]
    del roster["abcd"]
    disk.full = True
    await counted.flush()
    disk.full = False
    counted.add("abcd", "m", Used(1, prompt=5))
    counted.add("unknown", "m", Used(1, prompt=5))
    again = Usage(Disk(tmp_path), clock=clock)
    for one in (counted, again):
        answer = await one.tell(asked(), [])
        assert [(each.key, each.label) for each in answer.keys] == [("abcd", "mini")]
    assert {one.key for one in answer.usage} == {"abcd", "unknown"}
    later = (NOON + DAY * (number + 2) for number in range(store.MOST_DAYS))
    disk.add({Place(day_of(one).isoformat(), "", "m"): Used(1) for one in later})
    assert disk.names() == {}
