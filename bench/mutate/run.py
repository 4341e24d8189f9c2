"""The mutants of one package, drawn and run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.mutate.changes import Mutant, mutants, mutated
from bench.mutate.suite import ROOT, TESTS, Suite

EQUIVALENT = Path(__file__).with_name("equivalent.json")


@dataclass(frozen=True, order=True)
class Drawn:
    """One mutant of a file (named from the root of the tree), and the reason why it may survive, if any."""

    file: str
    index: int
    mutant: Mutant = field(compare=False)
    excuse: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.mutant.line} {self.mutant.name}"


@dataclass
class Report:
    """What became of them. `killed` of `counted`: without the excused ones."""

    possible: int = 0
    run: int = 0
    counted: int = 0
    killed: int = 0
    killers: dict[str, str] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    false_excuses: dict[str, str] = field(default_factory=dict)
    stale_excuses: list[str] = field(default_factory=list)
    failed_unchanged: list[str] = field(default_factory=list)
    seconds: float = 0.0


def modules(package: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py"))


def excuses() -> dict[str, dict[str, str]]:
    """By file and mutant."""
    found = json.loads(EQUIVALENT.read_text())
    assert isinstance(found, dict)
    return found


def draw(package: str, only: set[str]) -> list[Drawn]:
    """Every mutant of a package, or of some of its files, in order."""
    known = excuses()
    return [
        Drawn(file, one.index, one, known.get(file, {}).get(one.name, ""))
        for file in modules(package)
        if not only or file in only
        for one in mutants((ROOT / file).read_text())
    ]


def stale(package: str) -> list[str]:
    """Excuses for mutants that there are no longer."""
    return [
        f"{file}: {name}"
        for file, known in excuses().items()
        if file.startswith(f"{package}/")
        for name in set(known) - _names(file)
    ]


def _names(file: str) -> set[str]:
    path = ROOT / file
    return {one.name for one in mutants(path.read_text())} if path.exists() else set()


def run(
    folder: Path,
    package: str,
    drawn: list[Drawn],
    tests: list[str],
    *,
    near: bool = False,
    excused: bool = True,
) -> Report:
    """Runs them one after the other in the copy `folder`, the excused ones among them or not.

    Raises RuntimeError if no test passes unchanged.
    """
    began = time.monotonic()
    suite = Suite(folder, package, tests, near=near)
    report = Report(possible=len(draw(package, set())), run=len(drawn))
    report.stale_excuses = stale(package)
    for number, one in enumerate(drawn, 1):
        killer = _killer(folder, suite, one) if excused or not one.excuse else ""
        _note(report, one, killer)
        _say(f"{package}: {number} of {len(drawn)}, {time.monotonic() - began:.0f} s")
    if not suite.unchanged.seconds and any(excused or not one.excuse for one in drawn):
        raise RuntimeError(f"no unit test of {package} passes without any change")
    report.failed_unchanged = suite.unchanged.failed
    report.seconds = round(time.monotonic() - began, 1)
    return report


def _killer(folder: Path, suite: Suite, one: Drawn) -> str:
    """What notices a mutant, from the tests close to it to those far from it."""
    importing = suite.importing(one.file, mirror(one.file))
    for files in suite.nearest(one.file, mirror(one.file)):
        suite.run_unchanged(files)
        reaching = suite.unchanged.reaching(one.file, one.mutant.lines, importing)
        tests = {test for test in reaching if test.partition("::")[0] in files}
        if tests and (killer := _killer_of(folder, suite, one, tests)):
            return killer
    return ""


def _killer_of(folder: Path, suite: Suite, one: Drawn, tests: set[str]) -> str:
    target = folder / one.file
    source = target.read_text()
    seconds = 60 + 5 * sum(suite.unchanged.seconds[test] for test in tests)
    while True:
        target.write_text(mutated(source, one.mutant))
        try:
            killer = suite.notices(tests, seconds)
        finally:
            target.write_text(source)
        if killer != "time" or suite.notices(tests, seconds) != "time":
            return killer
        seconds *= 2  # the machine is so slow just now


def mirror(file: str) -> str:
    """The test file that mirrors a source file."""
    package = next(name for name in TESTS if file.startswith(f"{name}/"))
    inner = Path(file).relative_to(package)
    return (Path(TESTS[package][0]) / inner.with_name(f"test_{inner.name}")).as_posix()


def _note(report: Report, one: Drawn, killer: str) -> None:
    if one.excuse and not killer:
        report.excused.append(str(one))
        return
    report.counted += 1
    if killer:
        report.killed += 1
        report.killers[str(one)] = killer
        if one.excuse:
            report.false_excuses[str(one)] = killer
            _say(f"false excuse: {one} ({killer})")
    else:
        report.survivors.append(str(one))
        _say(f"survived: {one}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
