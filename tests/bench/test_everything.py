"""All benchmarks in turn: what becomes of those that fail, hang, or come too late."""

import contextlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from bench import everything, frame

SCRIPT = """
import os, signal, subprocess, sys, time
name = sys.argv[1]
print(name, sys.argv[2:], file=open(os.environ["RAN"], "a"))
if name == "checks": sys.exit(13)
if name == "bad": raise RuntimeError("no")
if name == "dies": os.kill(os.getpid(), signal.SIGKILL)
if name == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["RAN"] + ".new", "w") as file:
        print(child.pid, file=file)
    os.rename(os.environ["RAN"] + ".new", os.environ["RAN"] + ".pid")
    time.sleep(600)
"""


def benchmark(name, seconds=200.0):
    return frame.Benchmark(
        name,
        name,
        lambda parser: None,
        lambda options: {},
        lambda result: [],
        quick_seconds=seconds,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    passed = 0.0

    class Process(subprocess.Popen):
        """All time that is waited for passes at once, as soon as what hangs hangs."""

        def wait(self, timeout=None):
            nonlocal passed
            if timeout is None or "hangs" not in self.args:
                return super().wait()
            while not (tmp_path / "ran.pid").exists():
                assert self.poll() is None
                time.sleep(0.01)
            passed += timeout
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(everything, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Process}))
    monkeypatch.setattr(everything, "time", SimpleNamespace(monotonic=lambda: passed))

    def call(*chosen, **options):
        options = {"quick": True, "out": None, "say": lambda text: None, **options}
        return everything.run_all(chosen=chosen, command=(sys.executable, str(script)), **options)

    call.ran = lambda: (tmp_path / "ran").read_text().splitlines()
    call.child = lambda: int((tmp_path / "ran.pid").read_text())
    return call


def test_one_that_fails_does_not_stop_the_others(run, tmp_path):
    said = []
    names = ["checks", "bad", "dies", "good"]
    found = run(*map(benchmark, names), out=tmp_path / "out", say=said.append)
    assert [one.outcome for one in found] == [
        "failed with status 13",
        "failed with status 1",
        "failed with status -9",
        "done",
    ]
    assert [one.good for one in found] == [False, False, False, True]
    assert [line.split()[0] for line in run.ran()] == names
    assert "--quick" in run.ran()[0]
    assert len(said) == 4
    written = json.loads((tmp_path / "out" / "all.json").read_text())
    assert [one["bench"] for one in written["outcomes"]] == names


def test_one_that_hangs_is_ended_with_what_it_started(run):
    found = run(benchmark("hangs", 60.0), benchmark("good"))
    assert [one.outcome for one in found] == ["out of time", "done"]
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(run.child())
        while child.status() != psutil.STATUS_ZOMBIE:  # nobody has waited for it yet; else never
            time.sleep(0.05)


def test_the_whole_has_a_limit(run):
    found = run(benchmark("hangs", 60.0), benchmark("good"), total=50.0)
    assert [one.outcome for one in found] == ["out of time", "not begun"]
    assert len(run.ran()) == 1


def test_quick_limits_fit_into_the_whole():
    chosen = everything.benchmarks()
    assert "serve" not in {one.name for one in chosen}
    assert all(1 <= one.quick_seconds <= 200 for one in chosen)
