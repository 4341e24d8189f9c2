"""A private copy of the tree, and a package's own tests run in it, each time in a forked child.

A mutant is tried first with the tests that mirror its file, then with those that import it, those that import
what imports it, and the rest, folder by folder; last of all with those that start the real processes. A file
of tests runs without any change once, when a mutant first needs it: what is noticed close by costs little.

Leaks count: what a test leaves unclosed fails it, as the warning or the unraisable exception that it is.

Beside the copy stands an interpreter that imports it, which tests start their processes with: those, too, run
what was changed. What `python -m` runs there belongs to all tests of the file whose test started it.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import functools
import gc
import importlib
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TESTS: dict[str, tuple[str, ...]] = {
    "mesh": ("tests/mesh", "tests/trust"),
    "coordinator": ("tests/coordinator",),
    "node": ("tests/node",),
    "gateway": ("tests/gateway",),
    "cli": ("tests/cli",),
    "sealring/client": ("tests/client",),
}
"""The packages and where their unit tests are."""

_OURS = {"bench", "tests", "sealring"}
_NEVER_FIRST = {*_OURS, "mlx_lm", "transformers"}
"""What only the children import: what may be changed, what imports that, and what engines load in a way of
their own."""

_OPTIONS = (
    *("-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0"),
    *("-m", "not sweep", "-Wignore:Module already imported"),
    *("-Werror::ResourceWarning", "-Werror::pytest.PytestUnraisableExceptionWarning"),
)
_FAR = 3
"""Steps of imports between a test and a file that say nothing any more."""

_PATIENCE = 7200.0
"""Seconds for a package's tests without any change."""

_AT_START = """
import os, sys
if os.path.exists({test!r}) and "-m" in sys.orig_argv[:3]:
    import coverage
    with open({test!r}) as file:
        watch = coverage.Coverage(config_file={options!r}, context=file.read(), auto_data=True)
    watch._warn_no_data = False
    watch.start()
"""
"""What each process of the copy's interpreter does first: it is watched while there is a test to watch."""

_WATCHING = """
[run]
data_file = {beside}/covered/data
parallel = true
include = {folder}/*
patch = _exit
sigterm = true
"""


@dataclass
class Unchanged:
    """What the tests do without any change: their seconds, and which of them run which line of which file.

    Tests that fail, leak or are skipped are left out: they can say nothing about a mutant.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def reaching(self, file: str, lines: Collection[int], importing: Collection[str]) -> set[str]:
        """The tests that run one of these lines. No lines stand for what runs as the file is imported, which
        belongs to no test: then those that run anything of the file and all of the files of tests that import
        it, or all of them if that is none."""
        here = self.lines.get(file, {})
        if lines:
            return {test for line in lines for test in here.get(line, ())}
        found = {test for tests in here.values() for test in tests}
        found |= {test for test in self.seconds if here and test.partition("::")[0] in importing}
        return found or (set(self.seconds) if here else set())


class Suite:
    """The unit tests of one package in a folder that holds a copy of the tree."""

    def __init__(
        self, folder: Path, package: str, files: Collection[str] = (), *, near: bool = False
    ) -> None:
        self._folder = folder
        self._near = near
        self._package = package
        self._files = _found(folder, files or TESTS[package])
        self._imports = functools.cache(lambda name: _imports(folder, name))
        self._ran: set[str] = set()
        self.unchanged = Unchanged()

    def nearest(self, file: str, mirror: str) -> Iterator[set[str]]:
        """All files of tests in groups, those that say most about a file of source first: its mirror, those
        that import it or what imports it, then the others by folder, those close to the mirror before those
        far from it.

        Without the others if it is `near` alone."""
        groups: defaultdict[tuple[bool, int, str], set[str]] = defaultdict(set)
        for test in self._files:
            dear, folder = (
                "pytest.mark.integration" in (self._folder / test).read_text(),
                os.path.dirname(test),
            )
            steps = self._steps(test, file)
            if test == mirror:
                groups[False, -_FAR, ""].add(test)
            elif steps < _FAR:
                groups[dear, steps - _FAR, ""].add(test)
            else:
                groups[dear, os.path.relpath(folder, os.path.dirname(mirror)).count("/"), folder].add(test)
        yield from (groups[key] for key in sorted(groups) if key[1] < 0 or not self._near)

    def importing(self, file: str, mirror: str) -> set[str]:
        """The files of tests that import a file of source by themselves, and its mirror."""
        return {test for test in self._files if test == mirror or file in self._imports(test)}

    def _steps(self, test: str, file: str) -> int:
        """1: the test, or the fixtures beside it, import the file; 2: what they import does."""
        found = {test, os.path.join(os.path.dirname(test), "conftest.py")}
        for steps in range(1, _FAR):
            found = {name for one in found for name in self._imports(one)}
            if file in found:
                return steps
        return _FAR

    def run_unchanged(self, files: Collection[str]) -> None:
        """Runs those of these files of tests that did not run yet, watching which test runs what.

        Imports what the tests needed and cannot change, once for all children to come.
        """
        new = sorted(set(files) - self._ran)
        if not new:
            return
        self._ran.update(new)
        _, found = self._in_child(None, self._package, _PATIENCE, new)
        for module in found["modules"]:
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                importlib.import_module(module)
        self.unchanged.seconds |= found["seconds"]
        self.unchanged.failed += found["failed"]
        for file, of_file in found["lines"].items():
            here = self.unchanged.lines.setdefault(file, {})
            for line, tests in of_file.items():
                here.setdefault(int(line), []).extend(found["tests"][one] for one in tests)

    def notices(self, tests: Collection[str], seconds: float) -> str:
        """The test that failed, what else ended the run ("time", "import", "crash"), or "" if all pass.

        It ends at the first failure or after `seconds`.
        """
        status, told = self._in_child(set(tests), None, seconds)
        if status in (0, 5):
            return ""
        if told["failed"]:
            return str(told["failed"][0])
        return "time" if status is None else "import" if status == 2 else "crash"

    def _in_child(
        self, chosen: set[str] | None, watched: str | None, seconds: float, files: Collection[str] = ()
    ) -> tuple[int | None, dict[str, Any]]:
        """Runs the chosen tests, or all of `files`: the exit status, None if it had to be killed, and what
        was told."""
        out = self._folder / ".told.json"
        out.unlink(missing_ok=True)
        until = time.monotonic() + seconds
        child = os.fork()
        if child == 0:
            run = sorted({test.split("::")[0] for test in chosen}) if chosen else list(files)
            _be_child(self._folder, run, _Plugin(self._folder, out, chosen, watched))
        status = None
        try:
            while status is None and time.monotonic() < until:
                done, waited = os.waitpid(child, os.WNOHANG)
                if done:
                    status = os.waitstatus_to_exitcode(waited)
                else:
                    time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            if status is None:
                os.waitpid(child, 0)
        try:
            return status, json.loads(out.read_text())
        except (OSError, ValueError):
            return status, {"seconds": {}, "failed": [], "modules": [], "lines": {}}


def _found(folder: Path, names: Collection[str]) -> list[str]:
    """The files of tests among these files and in these folders."""
    every = [one for name in names for one in [folder / name, *(folder / name).rglob("test_*.py")]]
    return sorted({path.relative_to(folder).as_posix() for path in every if path.is_file()})


def _imports(folder: Path, file: str) -> set[str]:
    """The files of the tree that one of its files imports, helpers of tests among them."""
    path = folder / file
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text() if path.is_file() else "")):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = "sealring." + ".".join(Path(file).parts[: -node.level]) + "." if node.level else ""
            module = (above + (node.module or "")).rstrip(".")
            names |= {module, *(f"{module}.{one.name}" for one in node.names)}
    found = set()
    for name in names:
        inner = name.replace(".", "/")
        for place in (inner.removeprefix("sealring/"), inner, f"tests/support/{inner}"):
            found |= {one for one in (f"{place}.py", f"{place}/__init__.py") if (folder / one).is_file()}
    return found


class _Plugin:
    """Chooses tests and tells what they did; collects garbage after each, so that a leak is found
    where it is made."""

    def __init__(self, folder: Path, out: Path, chosen: set[str] | None, watched: str | None) -> None:
        self._folder = folder
        self._out = out
        self._chosen = chosen
        self.watched = watched
        self._coverage: Any = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: list[str] = []
        self._skipped: set[str] = set()

    def start(self) -> None:
        if self.watched is not None:
            import coverage

            include = [f"{self._folder}/{self.watched}/*"]
            shutil.rmtree(_beside(self._folder, "covered"), ignore_errors=True)
            _beside(self._folder, "covered").mkdir()
            self._coverage = coverage.Coverage(data_file=None, include=include, config_file=False)
            self._coverage.start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._chosen is not None:
            items[:] = [item for item in items if item.nodeid in self._chosen] or items
        items.sort(key=lambda item: item.get_closest_marker("integration") is not None)  # the dear ones last

    def pytest_collection_finish(self) -> None:
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._coverage is not None:
            self._coverage.switch_context(item.nodeid)
            _beside(self._folder, "test").write_text(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        gc.collect()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)
            if self._chosen is not None:
                self._tell()
        elif report.skipped:
            self._skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._tell()

    def _of_others(self, name: str, module: object) -> bool:
        file = getattr(module, "__file__", None)
        ours = file is not None and Path(file).is_relative_to(self._folder)
        return not ours and name.partition(".")[0] not in _NEVER_FIRST

    def _tell(self) -> None:
        useless = self._skipped.union(self._failed)
        seconds = {test: round(one, 4) for test, one in self._seconds.items() if test not in useless}
        tests = list(seconds)
        told: dict[str, Any] = {"seconds": seconds, "failed": self._failed, "tests": tests, "lines": {}}
        told["modules"] = [name for name, module in sys.modules.items() if self._of_others(name, module)]
        if self._coverage is not None:
            self._coverage.stop()
            numbers = {test: number for number, test in enumerate(tests)}
            data = self._coverage.get_data()
            for path in data.measured_files():
                told["lines"][os.path.relpath(path, self._folder)] = {
                    line: [numbers[one] for one in contexts if one in numbers]
                    for line, contexts in data.contexts_by_lineno(path).items()
                }
            _beside(self._folder, "test").unlink(missing_ok=True)
            self._add_children(told["lines"], tests)
        self._out.write_text(json.dumps(told))

    def _add_children(self, lines: dict[str, dict[int, list[int]]], tests: list[str]) -> None:
        """Adds what processes of the tests ran. They may be shared by the tests of a file. What ran here
        as a file was imported did so there, too, and still belongs to no test."""
        import coverage

        imported = {name: {line for line, ran in here.items() if not ran} for name, here in lines.items()}
        of_file: defaultdict[str, list[int]] = defaultdict(list)
        for number, test in enumerate(tests):
            of_file[test.partition("::")[0]].append(number)
        found: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        for path in _beside(self._folder, "covered").iterdir():
            data = coverage.CoverageData(str(path))
            with contextlib.suppress(coverage.exceptions.CoverageException):  # of one that was killed
                data.read()
            started = {
                number for one in data.measured_contexts() for number in of_file[one.partition("::")[0]]
            }
            for file in data.measured_files():
                name = os.path.relpath(file, self._folder)
                if name.startswith(f"{self.watched}/"):
                    for line in set(data.lines(file) or ()) - imported.get(name, set()):
                        found[name, line] |= started
        for (name, line), ran in found.items():
            known = lines.setdefault(name, {}).setdefault(line, [])
            known += sorted(ran.difference(known))


def _be_child(folder: Path, files: list[str], plugin: _Plugin) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]  # as it is in the tree that this runs in
    sys.path.insert(0, str(folder))
    sys.executable = str(_python(folder))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    code = 1
    try:
        plugin.start()
        mode = "-x" if plugin.watched is None else "--timeout=300"
        code = int(pytest.main([*_OPTIONS, mode, *files], plugins=[plugin]))
    finally:
        os._exit(code)


def copy_tree(folder: Path) -> None:
    """A private copy of the tree, so that nothing changes in the one that people work in, and beside it an
    interpreter that imports the copy, whatever its environment.

    Compiled once, with the source's hash beside it, so that a changed file is never taken for the old one.
    """
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink():  # as `sealring/mesh` to the folder beside it
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder, quiet=2, invalidation_mode=mode)
    for ask in (["init", "-q"], ["add", "-A"]):  # there are tests that ask git what there is
        subprocess.run(["git", *ask], cwd=folder, capture_output=True, check=True, timeout=60)
    _make_python(folder)


def _make_python(folder: Path) -> None:
    venv.create(_beside(folder, "python"), symlinks=True)
    python = _python(folder)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(_beside(folder, "python"))}))
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "copy.pth").write_text("\n".join([str(folder), *others, "import _watched", ""]))
    test, options = _beside(folder, "test"), _beside(folder, "coveragerc")
    (packages / "_watched.py").write_text(_AT_START.format(test=str(test), options=str(options)))
    options.write_text(_WATCHING.format(folder=folder, beside=folder.parent))
    script = Path(sys.executable).with_name("sealring")
    if script.exists():
        own = python.with_name("sealring")
        own.write_text(f"#!{python}\n" + script.read_text().partition("\n")[2])
        own.chmod(0o755)


def _python(folder: Path) -> Path:
    return _beside(folder, "python") / "bin" / "python"


def _beside(folder: Path, name: str) -> Path:
    """Something that belongs to a copy and is no part of it."""
    return folder.parent / name
