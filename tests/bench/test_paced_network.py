"""A paced cluster's nodes have namespaces of the network, or are on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from bench.paced.network import network


def test_without_root_everything_stays_on_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    with network(2, 0.001) as found:
        assert found is None


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
def test_nodes_reach_each_other_and_nothing_is_left():
    def listed() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    with network(2, 0.001) as found:
        assert found is not None
        assert len({found.host, *found.hosts}) == 3
        assert all(space in listed() for space in found.spaces)
        routes = ["ip", "-n", found.spaces[0], "route", "get", found.hosts[1]]
        assert "dev net0" in subprocess.run(routes, capture_output=True, text=True, check=True).stdout
    assert not any(space in listed() for space in found.spaces)
