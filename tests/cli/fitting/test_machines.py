from __future__ import annotations

import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

from bench.paced.figures import figures
from sealring.cli.fitting import machines
from sealring.cli.fitting.fitting import rate_of
from sealring.cli.fitting.machines import GB_PER_S, chip_of, mac, mac_of, own_mac, parse_memory, told
from sealring.mesh.errors import InvalidInput
from sealring.v1 import admin_pb2

GIB = 1 << 30


def test_macs_by_memory_have_the_likely_chips_unless_these_are_named() -> None:
    assert told(parse_memory("64,36,16")) == "64 GB M4 Pro, 36 GB M3 Pro, 16 GB M4"
    assert told(parse_memory("64 GB, 36GiB", "m4max,Apple M3 Max")) == "64 GB M4 Max, 36 GB M3 Max"
    assert [one.name for one in parse_memory("16,16")] == ["16 GB #1", "16 GB #2"]
    assert [one.name for one in parse_memory("512")] == ["512 GB"]


@pytest.mark.parametrize(
    ("memory", "chips"),
    [
        ("", ""),
        ("64,", ""),
        ("0", ""),
        ("64MB", ""),
        ("64", "m4,m4"),
        ("64", "m99"),
        (",".join(["8"] * 65), ""),
    ],
)
def test_other_texts_are_refused(memory: str, chips: str) -> None:
    with pytest.raises(InvalidInput, match=r"--(memory|chip)"):
        parse_memory(memory, chips)


@pytest.mark.parametrize("chip", GB_PER_S)
def test_chips_are_known_in_the_words_of_system_and_users(chip: str) -> None:
    titled = "Apple " + chip.title()
    assert {chip_of(text) for text in (chip, titled, chip.replace(" ", ""), chip.replace(" ", "-"))} == {chip}


def test_this_machine_has_its_own_memory_and_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("Memory", "total")(48 * GIB - 5000))
    monkeypatch.setattr(machines, "sysctl", lambda name: b"Apple M4 Pro\0")
    assert own_mac() == mac(48, "m4 pro", "this machine (48 GB)")
    monkeypatch.setattr(machines, "sysctl", lambda name: b"")
    assert rate_of(own_mac(), 1.0) is None


def test_a_node_has_the_memory_that_it_reports() -> None:
    node = admin_pb2.Node(name="attic")
    node.heartbeat.memory_total, node.heartbeat.memory_usable = 64 * GIB, 40 * GIB
    found = mac_of(node)
    assert (found.name, found.usable, found.chip) == ("attic", 40 * GIB, "m4 pro")


@pytest.mark.parametrize("name", ["m4pro", "m4max", "m3ultra", "m5max"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_rates_are_near_those_that_were_published(name: str, kind: str) -> None:
    """The time of a step that reads 5 GB in 40 layers, by `bench/macs.toml` and by the figures here."""
    known = figures().machines[name]
    published = 5e9 / known.bandwidth(kind) + 40 * known.layer_us[kind] / 1e6
    rate = rate_of(mac(64, chip_of(name)), 1.0)
    assert rate is not None
    assert 5e9 / rate.bytes_per_second + 40 * rate.layer_seconds == pytest.approx(published, rel=0.2)


def test_the_chips_of_the_bench_are_known_here() -> None:
    machines = tomllib.loads((Path(__file__).parents[3] / "bench/macs.toml").read_text("utf-8"))["machines"]
    published = [name for name, one in machines.items() if one["mark"] != "J"]  # the rest was assumed
    assert published
    assert all(chip_of(name) for name in published)
