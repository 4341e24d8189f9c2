"""Usage on disk: added up, bounded in days and rows, whole after a full disk and after damage."""

from __future__ import annotations

import datetime
import sqlite3
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.gateway.usage import store
from sealring.gateway.usage.store import USAGE_FILE, Place, UsageStore, Used

DAY = "2026-11-30"


def test_what_is_added_is_a_sum_in_a_private_file(tmp_path: Path) -> None:
    kept = UsageStore(tmp_path)
    laptop, desk = Place(DAY, "laptop", "qwen"), Place("2026-11-29", "", "qwen")
    kept.add({laptop: Used(1, 10, 4, 3, 250), desk: Used(1, 1, 0, 1, 5)})
    kept.add({laptop: Used(2, 5, 5, 7, 50)})
    assert UsageStore(tmp_path).read() == {laptop: Used(3, 15, 9, 10, 300), desk: Used(1, 1, 0, 1, 5)}
    assert list(kept.read()) == [laptop, desk]
    assert list(kept.read(DAY)) == [laptop]
    assert list(kept.read(most=1)) == [laptop]
    assert stat.S_IMODE((tmp_path / USAGE_FILE).stat().st_mode) == 0o600


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 99)), max_size=20))
def test_no_token_is_lost_however_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, added: list[tuple[int, int, int]]
) -> None:
    kept = UsageStore(tmp_path_factory.mktemp("usage"))
    for day, key, tokens in added:
        kept.add({Place(f"2026-11-0{day + 1}", str(key), "m"): Used(1, tokens, 0, 1)})
    found = kept.read().values()
    assert sum(one.prompt for one in found) == sum(tokens for *_, tokens in added)
    assert sum(one.requests for one in found) == len(added)


def test_the_last_year_is_kept_whatever_the_clock_says(tmp_path: Path) -> None:
    kept, first = UsageStore(tmp_path), datetime.date(2026, 1, 1)
    days = [(first + datetime.timedelta(days=number)).isoformat() for number in range(store.MOST_DAYS + 3)]
    kept.add({Place(day, "", "m"): Used(1) for day in days})
    kept.add({Place("2093-01-01", "", "m"): Used(1)})
    assert sorted(place.day for place in kept.read()) == [*days[4:], "2093-01-01"]


def test_rows_are_bounded_for_each_day_and_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_A_DAY", 3)
    monkeypatch.setattr(store, "MOST_ROWS", 6)
    kept = UsageStore(tmp_path)
    for day in ("2026-11-28", "2026-11-29", DAY):
        kept.add({Place(day, f"key-{number}", "m"): Used(1, 10) for number in range(9)})
    assert [place.key for place in kept.read()] == ["", "key-0", "key-1", "key-2"]
    assert kept.read()[Place(DAY, "", "")] == Used(6, 60)
    kept.add({Place(DAY, "key-1", "m"): Used(1)})
    assert kept.read()[Place(DAY, "key-1", "m")] == Used(2, 10)


def test_a_full_disk_takes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = UsageStore(tmp_path)
    kept.add({Place(DAY, "", "m"): Used(1)})
    connect = sqlite3.connect

    def full(*arguments: object, **options: object) -> sqlite3.Connection:
        made = connect(*arguments, **options)  # type: ignore[call-overload]
        made.execute("PRAGMA max_page_count = 2")
        return made  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", full)
    many = {Place(DAY, f"{number:040}", "m"): Used(1) for number in range(1000)}
    with pytest.raises(sqlite3.OperationalError, match="full"):
        kept.add(many)
    assert list(kept.read()) == [Place(DAY, "", "m")]
    monkeypatch.setattr(sqlite3, "connect", connect)
    kept.add(many)
    assert len(kept.read()) == 1001


@pytest.mark.parametrize("damaged", [b"not a database" * 400, None])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damaged: bytes | None) -> None:
    kept, file = UsageStore(tmp_path), tmp_path / USAGE_FILE
    kept.add({Place(DAY, f"{number:040}", "m"): Used(1) for number in range(1000)})
    data = file.read_bytes()
    file.write_bytes(damaged or data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(sqlite3.DatabaseError):
        kept.read()
    kept.add({Place(DAY, "", "m"): Used(1)})
    assert list(kept.read()) == [Place(DAY, "", "m")]
    assert file.with_suffix(".damaged").exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / USAGE_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        UsageStore(tmp_path).add({Place(DAY, "", "m"): Used(1)})
    assert not (tmp_path / "elsewhere").exists()
