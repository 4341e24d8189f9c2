"""All benchmarks in turn: what becomes of those that fail, hang, or come too late."""

import json
import os
import signal
import sys
import time
from pathlib import Path

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
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, file=open(os.environ["RAN"] + ".pid", "w"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""


def benchmark(name, seconds=20.0):
    return frame.Benchmark(
        name,
        name,
        lambda parser: None,
        lambda options: {},
        lambda result: [],
        lambda result, figure: None,
        quick_seconds=seconds,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr(everything, "_GRACE_SECONDS", 0.3)

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
        "checks failed",
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
    found = run(benchmark("hangs", 1.5), benchmark("good"))
    assert [one.outcome for one in found] == ["out of time", "done"]
    for _ in range(100):
        try:
            os.kill(run.child(), 0)
        except ProcessLookupError:
            break
        stat = Path(f"/proc/{run.child()}/stat")
        if stat.exists() and stat.read_text().split()[2] == "Z":  # nobody has waited for it yet
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of an ended benchmark is still there")


def test_the_whole_has_a_limit(run):
    found = run(benchmark("hangs", 60.0), benchmark("good"), total=1.5)
    assert [one.outcome for one in found] == ["out of time", "not begun"]
    assert len(run.ran()) == 1


def test_quick_limits_fit_into_the_whole():
    chosen = everything.benchmarks()
    assert "serve" not in {one.name for one in chosen}
    assert all(1 <= one.quick_seconds <= 200 for one in chosen)


@pytest.mark.parametrize(("outcome", "status"), [("done", 0), ("out of time", 13)])
def test_the_command_tells_each_outcome_and_fails_if_one_did(monkeypatch, outcome, status):
    from typer.testing import CliRunner

    from cli.main import app

    made = [everything.Outcome("seal", outcome, 2.0, 60.0), everything.Outcome("loop", "done", 3.0, 60.0)]
    monkeypatch.setattr(everything, "run_all", lambda **options: made)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        result = CliRunner().invoke(app, ["bench", "all", "--quick"])
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)
    assert result.exit_code == status
    assert "5 s altogether" in result.output
    assert ("failed: seal" in result.output) == (status == 13)
