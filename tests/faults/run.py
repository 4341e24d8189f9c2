"""`make faults`: the matrix against real processes; exits with 1 if anything was lost, wrong or left.

    make faults ARGS="--only 'kill engine'"
    make faults ARGS="--json docs/reliability/faults.json" && python -m bench report

A run adds its round to the file.

Needs root on Linux, for network namespaces. Everything is in namespaces of this command, and ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cases import CASES, Case
from harness import STANDBY, Outcome, SeparatePlace, separate_place, suffer

from bench.frame import commit, machine

ROOT = Path(__file__).parents[2]


async def main(options: argparse.Namespace) -> int:
    wanted = [one for one in CASES if re.search(options.only, one.name)]
    found: dict[str, Outcome] = {}
    record = Record(options.json)
    async with Clusters() as clusters:
        for number, case in enumerate(wanted, 1):
            begun = time.monotonic()
            outcome = await suffer(await clusters.place(case), case)
            if not outcome.good:
                clusters.keep_logs(re.sub(r"\W+", "-", case.name))
            if outcome.broken or case.standby:
                await clusters.discard()
            found[case.name] = outcome
            record.write(found)
            say(f"{number}/{len(wanted)} {line(case, outcome)} ({time.monotonic() - begun:.0f} s)")
    return int(not all(outcome.good for outcome in found.values()))


class Record:
    """The rounds of a file, this one the last; written after every case."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before = json.loads(path.read_text()) if path and path.exists() else []
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._run = {"date": date, "commit": commit(), "machine": machine(), "load": os.getloadavg()[0]}

    def write(self, found: dict[str, Outcome]) -> None:
        if self._path is not None:
            cases = {name: vars(one) | {"lost": one.lost} for name, one in found.items()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps([*self._before, self._run | {"cases": cases}], indent=1) + "\n")


class Clusters:
    """One cluster for all cases; another where a case broke it."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._place: SeparatePlace | None = None
        self._made_for = (0, False, False)

    async def __aenter__(self) -> Clusters:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.discard()

    async def place(self, case: Case) -> SeparatePlace:
        wanted = case.certificates, case.standby, case.on_demand
        if self._made_for != wanted:
            await self.discard()
        if self._place is None:
            self._made_for = wanted
            settings: dict[str, Any] = {"standby": STANDBY} if case.standby else {}
            if case.certificates:
                settings |= {"certificate_lifetime": case.certificates, "roster_lifetime": 60}
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="sealring-faults-"))
            self._place = await self._stack.enter_async_context(
                separate_place(Path(folder) / "state", on_demand=case.on_demand, coordinator=settings)
            )
        return self._place

    def keep_logs(self, name: str) -> None:
        if self._place is not None:
            there = ROOT / "build" / "faults" / name
            shutil.copytree(self._place.cluster.state_dir / "logs", there, dirs_exist_ok=True)

    async def discard(self) -> None:
        self._place = None
        await self._stack.aclose()


def line(case: Case, outcome: Outcome) -> str:
    if outcome.lacking:
        return f"{case.name}: not run, {outcome.lacking}"
    errors = ", ".join(f"{count} x {name}" for name, count in outcome.errors.items()) or "none"
    said = [
        f"{case.name}: {'good' if outcome.good else 'BAD'}, of {outcome.requests} lost {outcome.lost}, wrong "
        f"{outcome.wrong}, asked again {outcome.again}, pause {outcome.pause:.1f} s, whole after "
        f"{outcome.back:.1f} s, errors: {errors}",
        *([f"first piece {outcome.first:.1f} s after waking"] if outcome.first else []),
        *(f"left {one}" for one in outcome.left),
        *outcome.notes,
        *([f"broken: {outcome.broken}"] if outcome.broken else []),
    ]
    return "; ".join(said)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to add what was seen")
    parser.add_argument("--only", default="", help="a regular expression for the cases' names")
    sys.exit(asyncio.run(main(parser.parse_args())))
