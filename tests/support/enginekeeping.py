"""The keeper of a node's engines, as a daemon makes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from sealring.node.daemon.cost_tables import CostTables
from sealring.node.daemon.engines import EngineKeeper, MemoryMeter
from sealring.node.daemon.fetching import Fetcher

Kept = TypeVar("Kept", bound=EngineKeeper)


def keeper_of(
    home: Path,
    folders: Sequence[Path],
    fetcher: Fetcher | None = None,
    kind: type[Kept] = EngineKeeper,  # type: ignore[assignment]
    on_cpu: bool = False,
) -> Kept:
    """A keeper of models in `folders`, with its cost tables in `home`; without `fetcher` it fetches none."""
    fetcher = fetcher or Fetcher(folders, home / "fetched", None, linked=home / "linked", allowed=False)
    tables = CostTables(home / "tables")
    return kind(folders=folders, meter=MemoryMeter(None), fetcher=fetcher, tables=tables, on_cpu=on_cpu)
