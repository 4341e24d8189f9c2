"""`sealring demo` as a newcomer runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kernels import share_kernels
from ringtest import MODEL

from sealring.cli.here.settings_files import PORTS

pytestmark = pytest.mark.integration
SEALRING = Path(sys.executable).with_name("sealring")


def test_demo_once_prints_one_json_object_and_leaves_nothing(tmp_path):
    """Two nodes do; tests/cli/commands/test_demo.py shows that there are three by default."""
    command = [SEALRING, "demo", "--nodes", "2", "--once", "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    shown = json.loads(done.stdout)
    wanted = {"answer", "prompt_tokens", "completion_tokens", "ttft_s", "tok_s", "suite", "min_trust", "ring"}
    assert wanted <= set(shown)
    assert "Paris" in shown["answer"]
    assert [member["rank"] for member in shown["ring"]] == [0, 1]
    layers = [member["layers"] for member in shown["ring"]]
    assert layers[0][0] == 0
    assert [low for low, _ in layers[1:]] == [high for _, high in layers[:-1]]
    assert shown["min_trust"] == "software"
    assert list(tmp_path.iterdir()) == []
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]


def test_a_demo_that_is_killed_leaves_nothing_running(tmp_path):
    """Its model is named, for without that there is a second ring, with a model that sees."""
    state = tmp_path / "state"
    share_kernels(state)
    (state / PORTS).write_text("{}")  # as an earlier demo left it, which had its kernels compiled
    command = [SEALRING, "demo", "--nodes", "2", "--state-dir", state, "--model", MODEL]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any(b"curl" in line for line in process.stdout), "it ended before it served"
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        finally:
            process.send_signal(signal.SIGKILL)
    # the command, coordinator, gateway, daemon, engine and carrier of each node, the head's chat template
    assert len(family) >= 10
    while not all(map(has_ended, family)):
        time.sleep(0.05)  # until the test's time is over


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
