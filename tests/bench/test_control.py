"""The gateway's token path with members in another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_measurement_that_is_ended_as_it_begins_leaves_nothing_running() -> None:
    command = [sys.executable, "-m", "bench", "control", "--rows", "1"]
    bench = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process = psutil.Process(bench.pid)
        while not process.children() and bench.poll() is None:
            time.sleep(0.01)
        children = process.children()
        os.killpg(bench.pid, signal.SIGTERM)
        assert bench.wait(100) == 128 + signal.SIGTERM
        assert psutil.wait_procs(children, 100)[1] == []
    finally:
        bench.kill()
        bench.wait()
