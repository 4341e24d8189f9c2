"""No example of hypothesis fails because the machine was slow, and no test because others were.

Tests are collected by a wall clock that is two days behind, and run by the right one. A time, certificate or
roster that a module makes at its import is therefore two days old in its tests. One that is valid only for a
quick run fails every time, and not now and then. gRPC's own TLS always has the right clock, since no test can
change it. `datetime.now()` cannot be turned: take the time from `time` or `mesh/clock.py`.

What this machine lacks, a privilege or a package, skips a test. In CI on Linux everything has to run: there
it fails, and only what a mark keeps for other systems is skipped.
"""

import contextlib
import fcntl
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

import sealring  # noqa: F401  # before gRPC, for which it sets what it reads at its import

# Examples differ from run to run: half of hypothesis' own number in each finds as much in two.
settings.register_profile(
    "sealring",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("sealring")

# Rows of a batch are compared with rows alone, and an M5's GPU multiplies float32 matrices in TF32 unless
# MLX reads this when it is imported.
os.environ["MLX_ENABLE_TF32"] = "0"

# No test calls anybody outside: httpx, and so each client of an SDK, need not parse the world's authorities,
# which takes 35 ms.
os.environ["SSL_CERT_DIR"] = os.devnull
os.environ.pop("SSL_CERT_FILE", None)

BEHIND_SECONDS = 2 * 86400
_right, _right_ns = time.time, time.time_ns
_behind = BEHIND_SECONDS


def _time() -> float:
    return _right() - _behind


def _time_ns() -> int:
    return _right_ns() - _behind * 1_000_000_000


time.time, time.time_ns = _time, _time_ns


@contextlib.contextmanager
def _after_the_first() -> Generator[None]:
    """In a clone without bytecode half of a collection is that pytest compiles asserts: one worker does, and
    the others wait until they can read what it wrote."""
    with open(__file__) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Ends the wrong time: also for those who keep a name of the clock that stood behind, as
    `sealring.mesh.clock.wall_clock`.

    What is made meanwhile, half a million objects, is left out of all later collections of garbage: hardly
    any of it is, and a test that frees a model would look through everything."""
    global _behind
    gc.disable()
    worker = hasattr(session.config, "workerinput") and not sys.dont_write_bytecode
    try:
        with _after_the_first() if worker else contextlib.nullcontext():
            return (yield)
    finally:
        _behind = 0
        time.time, time.time_ns = _right, _right_ns
        gc.freeze()
        gc.enable()
        if (clocks := sys.modules.get("sealring.mesh.clock")) is not None:
            own = clocks.machine_clocks.get()
            own.wall.__init__(own.system, own.boot)  # it would not follow such a step for a minute


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test whose result depends on random numbers has the same ones in each run."""
    random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    lacking = call.excinfo.value if call.excinfo else None
    by_mark = getattr(lacking, "_use_item_location", False)
    everything = os.environ.get("CI") and sys.platform == "linux"
    if isinstance(lacking, pytest.skip.Exception) and not by_mark:
        report.user_properties.append((_LACKING, lacking.msg))
        if everything:
            report.outcome, report.longrepr = "failed", f"not to be skipped in CI: {lacking.msg}"
    return report


_LACKING = "lacking"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says last what no test has looked at because this machine lacks something."""
    skipped = terminalreporter.stats.get("skipped", [])
    counts = Counter(msg for one in skipped for name, msg in one.user_properties if name == _LACKING)
    if counts:
        terminalreporter.section("not run for what this machine lacks")
    for msg, count in sorted(counts.items()):
        terminalreporter.write_line(f"{msg} ({count})")


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """After a test of real processes that failed, none of its fixtures is used again: a cluster that it left
    broken would fail every test that shares it."""
    if item.stash.get(_FAILED, False) and item.get_closest_marker("integration"):
        item.config.pluginmanager.get_plugin("runner").pytest_runtest_teardown(item, None)
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what waits for other processes, so that at the end all workers have something to do."""
    items.sort(key=lambda item: item.get_closest_marker("integration") is None)


class ByFile(LoadScopeScheduling):
    """Tests of one file run in one worker, since they share costly fixtures. So do tests of one package, if
    its files share a cluster. (xdist's own marks of groups have no effect with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = self.config.rootpath / nodeid.partition("::")[0]
        return str(file.parent if (file.parent / "__init__.py").exists() else file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)
