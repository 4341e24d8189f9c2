"""Every parser reads what macOS prints, and raises on nothing that it might print."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from doctortest import DATA, PYTHON, recording
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.doctor import (
    firewall,
    interpreter,
    memory,
    power,
    rdma,
    storage,
    thunderbolt,
    versions,
)
from sealring.doctor.interpreter import Signature

PARSERS: list[Callable[[str], object]] = [
    interpreter.parse_codesign,
    firewall.parse_state,
    firewall.parse_block_all,
    firewall.parse_apps,
    power.parse_settings,
    power.parse_thermal,
    power.parse_filevault,
    memory.parse_number,
    thunderbolt.parse_profile,
    thunderbolt.parse_hardware_ports,
    thunderbolt.parse_services,
    thunderbolt.parse_bridges,
    rdma.parse_status,
    rdma.parse_devices,
    rdma.parse_version,
    versions.parse_sw_vers,
    storage.parse_profile,
]
RECORDED = [recording(path.name) for path in sorted(DATA.iterdir())]
CUTS = st.tuples(st.sampled_from(RECORDED), st.integers(0, 4000), st.integers(0, 400), st.text(max_size=8))


def damaged(text: str, at: int, cut: int, put: str) -> str:
    return text[:at] + put + text[at + cut :]


@settings(max_examples=25)
@given(text=st.one_of(st.text(), CUTS.map(lambda parts: damaged(*parts))))
def test_no_parser_raises(text: str) -> None:
    for parse in PARSERS:
        parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["_items", "domain_uuid_key", "receptacle_1_tag", "receptacle_id_key", "result"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=25)
@given(buses=JSON)
def test_no_form_of_a_report_in_json_raises(buses: object) -> None:
    for text in (json.dumps({"SPThunderboltDataType": buses}), json.dumps(buses)):
        thunderbolt.parse_profile(text)
        storage.parse_profile(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"SPThunderboltDataType": {}}',
        "[" * 100_000,
        "1" * 5000,
        '{"SPThunderboltDataType": ' + "1" * 5000 + "}",
    ],
)
def test_what_breaks_json_readers_breaks_none(text: str) -> None:
    assert thunderbolt.parse_profile(text) is None
    assert storage.parse_profile(text) is None


def test_firewall_apps() -> None:
    assert firewall.parse_apps(recording("firewall-apps.txt")) == {
        "/usr/libexec/remoted": True,
        PYTHON.partition("/Contents/")[0]: False,
        "/usr/libexec/sshd-keygen-wrapper": True,
    }
    assert firewall.parse_apps("( Allow incoming connections )\n/a\n( Block incoming connections )\n") == {
        "/a": False
    }


def test_power_settings() -> None:
    mini, laptop = (power.parse_settings(recording(f"pmset-{name}.txt")) for name in ("mini", "laptop"))
    assert (mini["sleep"], mini["autorestart"], mini["sleep on power button"]) == (1, 0, 1)
    assert (laptop["sleepdisabled"], laptop["lowpowermode"]) == (1, 1)
    assert "hibernatefile" not in laptop


def test_thunderbolt_ports() -> None:
    ports = thunderbolt.parse_profile(recording("thunderbolt.json"))
    assert ports is not None
    assert [(port.receptacle, port.peer) for port in ports] == [
        ("3", "88F10ACA-5CAA-4F5D-8361-03EED54ACB5A"),
        ("2", ""),  # a Mac behind a dock is not at the end of this cable
        ("1", ""),
    ]
    assert ports[0].uuid == "7F158861-C131-4D0D-83B6-CA50EF76C32B"
    assert (ports[0].speed, ports[2].uuid) == ("80 Gb/s", "")


def test_interfaces() -> None:
    ports = thunderbolt.parse_hardware_ports(recording("hardware-ports.txt"))
    assert (ports["Thunderbolt 3"], ports["Thunderbolt Bridge"], len(ports)) == ("en4", "bridge0", 6)
    services = thunderbolt.parse_services(recording("services.txt"))
    assert services == {
        "en0": ("Ethernet", True),
        "bridge0": ("Thunderbolt Bridge", True),
        "en1": ("Wi-Fi", False),
    }
    bridges = thunderbolt.parse_bridges(recording("ifconfig.txt"))
    assert bridges == {"bridge0": (True, ("en2", "en3", "en4"))}
    assert thunderbolt.parse_bridges("") == thunderbolt.parse_addresses("") == {}


def test_no_more_ports_are_read_than_a_report_holds() -> None:
    ports = thunderbolt.parse_profile(json.dumps({"SPThunderboltDataType": [{}] * 65}))
    assert ports is not None
    assert len(ports) == 64
    members = "".join(f"\tmember: en{number} flags=3<LEARNING,DISCOVER>\n" for number in range(65))
    (up, read) = thunderbolt.parse_bridges(f"bridge7: flags=8822<BROADCAST> mtu 1500\n{members}")["bridge7"]
    assert not up
    assert read == tuple(f"en{number}" for number in range(64))


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (
            interpreter.parse_codesign,
            recording("codesign-homebrew.txt"),
            Signature(True, "org.python.python"),
        ),
        (interpreter.parse_codesign, recording("codesign-anonymous.txt"), Signature(True, "")),
        (
            interpreter.parse_codesign,
            recording("codesign-developer-id.txt"),
            Signature(True, "org.python.python", team="BMM5U3QVKW"),
        ),
        (interpreter.parse_codesign, recording("codesign-unsigned.txt"), Signature(False)),
        (interpreter.parse_codesign, recording("sw_vers.txt"), None),
        (firewall.parse_state, "Firewall is disabled. (State = 0)\n", 0),
        (
            firewall.parse_state,
            "Firewall is blocking all non-essential incoming connections. (State = 2) \n",
            2,
        ),
        (firewall.parse_state, "(State = 7)", None),
        (firewall.parse_block_all, "Block all DISABLED! \n", False),
        (firewall.parse_block_all, "Block all ENABLED! \n", True),
        (firewall.parse_block_all, "Firewall has block all state set to disabled.\n", False),
        (firewall.parse_block_all, "Firewall has block all state set to enabled.\n", True),
        (firewall.parse_block_all, "Firewall is set to block all non-essential incoming connections\n", True),
        (firewall.parse_block_all, "", None),
        (power.parse_thermal, recording("therm-cool.txt"), False),
        (power.parse_thermal, recording("therm-hot.txt"), True),
        (power.parse_thermal, "CPU_Speed_Limit \t= 100\n", False),
        (power.parse_thermal, "CPU_Scheduler_Limit \t= 99\n", True),
        (power.parse_thermal, "thermal warning level set to 1\n", True),
        (power.parse_thermal, "Performance Warning Level = 0\n", False),
        (power.parse_thermal, "something else\n", None),
        (power.parse_filevault, "FileVault is On.\nDecryption in progress: Percent completed = 12.5\n", True),
        (power.parse_filevault, "FileVault is Off, but will be enabled after the next restart.\n", False),
        (power.parse_filevault, "Error: something\n", None),
        (rdma.parse_status, "enabled\n", True),
        (rdma.parse_status, "disabled\n", False),
        (rdma.parse_status, "RDMA is enabled.", True),
        (rdma.parse_status, "", None),
        (rdma.parse_devices, recording("ibv_devices.txt"), ("rdma_en2", "rdma_en3")),
        (rdma.parse_version, "26.10.1\n", (26, 10, 1)),
        (rdma.parse_version, "26.x", ()),
        (rdma.parse_version, "1" * 9, ()),
        (rdma.parse_version, "1.2.3.4", (1, 2, 3, 4)),
        (rdma.parse_version, "1.2.3.4.5", ()),
        (memory.parse_number, "57344\n", 57344),
        (memory.parse_number, "0", 0),
        (memory.parse_number, "-1", None),
        (memory.parse_number, "٣", None),
        (versions.parse_sw_vers, recording("sw_vers.txt"), ("26.2", "25C56")),
        (storage.parse_profile, json.dumps({"result": {"digest": "ab" * 32}}), "ab" * 32),
        (storage.parse_profile, json.dumps({"result": {"digest": "$(reboot)"}}), None),
        (storage.parse_profile, json.dumps({"problem": {}}), None),
    ],
)
def test_what_macos_prints_is_read(parse: Callable[[str], object], text: str, expected: object) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(("word", "read"), [("x" * 101, "x" * 100), (7, ""), (None, ""), (["x"], "")])
def test_words_of_a_report_are_short_and_words(word: object, read: str) -> None:
    profile = json.dumps({"SPThunderboltDataType": [{"receptacle_1_tag": {"receptacle_id_key": word}}]})
    (port,) = thunderbolt.parse_profile(profile) or ()
    assert port.receptacle == read
