"""A rank that ends is noticed, and its configuration fails; ranks that never met try again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench import shards

RANK = """
import json, os, sys, time
rank, keys, met = os.environ["MLX_RANK"], sys.argv[2:], sys.argv[1] == "met"
if rank == "1":
    sys.exit(0 if met and "bad" not in keys else 1)
if met:
    print(json.dumps(["", ""]), flush=True)
    for key in keys:
        if key == "bad":
            time.sleep(1000)
        print(json.dumps([key, "exact"]), flush=True)
else:
    time.sleep(1000)
"""


def ranks_that(how: str, runs: list[list[str]]) -> Any:
    def command(file: Path, keys: Any) -> list[str]:
        runs.append(list(keys))
        return [sys.executable, "-c", RANK, how, *keys]

    return command


def test_a_configuration_that_ends_a_rank_is_named_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shards, "_command", ranks_that("met", []))
    found = shards.check_all(tmp_path, ["first", "bad", "last"], 2)
    assert found == {"first": "exact", "bad": "it ended or stalled the ranks", "last": "exact"}


def test_ranks_that_do_not_meet_are_no_configurations_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[list[str]] = []
    monkeypatch.setattr(shards, "_command", ranks_that("apart", runs))
    with pytest.raises(RuntimeError, match="2 ranks do not come together"):
        shards.check_all(tmp_path, ["first"], 2)
    assert runs == [["first"]] * 2 * 3
