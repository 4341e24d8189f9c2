from __future__ import annotations

import subprocess
import sys

CHILD = """
import resource, sys
print(*resource.getrlimit(resource.RLIMIT_CORE))
print(open("/proc/self/coredump_filter").read() if sys.platform == "linux" else 0)
"""
PARENT = f"""
import subprocess, sys
from sealring.mesh.system.coredumps import forbid_core_files
forbid_core_files()
sys.exit(subprocess.run([sys.executable, "-c", {CHILD!r}]).returncode)
"""


def test_neither_a_process_nor_its_children_leave_memory_in_core_files() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=200, check=True
    )
    limits, kinds = done.stdout.split("\n")[:2]
    assert limits == "0 0"
    assert int(kinds, 16) == 0
