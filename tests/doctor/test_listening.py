"""What the doctor reads of a machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from sealring.doctor.system import listens_itself


def test_a_process_that_listens_is_told_from_another_at_its_port() -> None:
    """Two accounts of one machine share its loopback ports."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert listens_itself(os.getpid(), port)
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert not listens_itself(other.pid, port)
        other.communicate()
        assert not listens_itself(other.pid, port), "it is no more"
    assert not listens_itself(os.getpid(), port)
    assert not listens_itself(0, port)
