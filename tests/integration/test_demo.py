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

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]
SEALRING = Path(sys.executable).with_name("sealring")


def test_demo_once_prints_one_json_object(tmp_path):
    command = [SEALRING, "demo", "--once", "--json", "--state", tmp_path / "state"]
    done = subprocess.run(command, capture_output=True, timeout=150, check=True)
    shown = json.loads(done.stdout)
    wanted = {"answer", "prompt_tokens", "completion_tokens", "ttft_s", "tok_s", "suite", "min_trust", "ring"}
    assert wanted <= set(shown)
    assert "Paris" in shown["answer"]
    assert [member["rank"] for member in shown["ring"]] == [0, 1, 2]
    layers = [member["layers"] for member in shown["ring"]]
    assert layers[0][0] == 0
    assert [low for low, _ in layers[1:]] == [high for _, high in layers[:-1]]
    assert shown["min_trust"] == 10


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_demo_leaves_nothing_running(tmp_path, blow):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [SEALRING, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if b"curl" in line:
            break
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 12  # coordinator, gateway, three daemons, engines and carriers
    process.send_signal(blow)
    process.wait(60)
    process.stdout.close()
    for _ in range(100):
        if not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family):
            break
        time.sleep(0.1)
    left = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    if blow != signal.SIGKILL:
        assert list(temporary.iterdir()) == []
