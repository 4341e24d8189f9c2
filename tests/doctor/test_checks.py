"""What each check makes of a machine: found, not found, and not to be found out."""

from __future__ import annotations

import json
import platform
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from appletest import GOOD
from doctortest import PYTHON, FakeSystem, by_id, recording

from sealring.doctor import (
    firewall,
    interpreter,
    local,
    memory,
    nvidia,
    power,
    rdma,
    thunderbolt,
    trust,
    versions,
)
from sealring.doctor.reach import check as check_reach
from sealring.doctor.reach import check_open_files
from sealring.doctor.report import Severity
from sealring.doctor.storage import check as check_storage
from sealring.doctor.system import Folder, Printed
from sealring.doctor.view import View, read_view
from sealring.node.settings import NodeSettings

NETWORK = {
    "/usr/sbin/networksetup -listallhardwareports": recording("hardware-ports.txt"),
    "/usr/sbin/networksetup -listnetworkserviceorder": recording("services.txt"),
    "/sbin/ifconfig -a": recording("ifconfig.txt"),
    "/usr/sbin/system_profiler": recording("thunderbolt.json"),
}


def test_a_machine_that_tells_nothing_is_all_unknown_and_never_a_crash(view: View) -> None:
    found = local.examine(FakeSystem(), view)
    unknown = [one for one in found.findings if one.what.startswith("could not tell")]
    assert {one.id.partition(".")[0] for one in unknown} == set(local.MACS)
    assert {one.severity for one in unknown} == {Severity.NOTE}
    assert all(one.why for one in unknown)


@pytest.mark.parametrize("check", [power, rdma, firewall, interpreter, memory, thunderbolt])
def test_what_could_not_be_told_says_why(view: View, check: Any) -> None:
    """A missing command, a failing one and one with unknown words have different reasons."""
    whys = []
    for answer in (None, Printed(why="it took too long"), "nothing of use\n"):
        says = {} if answer is None else {"/": answer}
        found = [one for one in check.check(FakeSystem(says), view) if one.what.startswith("could not tell")]
        assert found
        whys.append([one.why for one in found])
    missing, slow, unknown = whys
    assert all(why.endswith("is not on this machine") for why in missing)
    assert set(slow) == {"it took too long"}
    assert not [why for why in unknown if why in (*missing, *slow) or not why]


def test_a_check_that_fails_stops_no_other(view: View) -> None:
    class Broken(FakeSystem):
        def memory(self) -> int:
            raise RuntimeError("a fault")

    found = by_id(local.examine(Broken(), view).findings)
    assert found["memory.check"].why == "the check failed: RuntimeError"
    assert {"power.sleep", "rdma.status", "system.facts"} <= set(found)


def test_elsewhere_what_only_macs_have_is_one_line(view: View) -> None:
    system = FakeSystem(platform="linux")
    found = by_id(local.examine(system, view).findings)
    assert "not applicable on linux" in found["system.other"].what
    assert [one.split()[0] for one in system.ran] == [nvidia.NVIDIA_SMI]
    assert found["trust.possible"].severity is Severity.NOTE


@pytest.mark.parametrize(
    ("name", "launchd", "severity"),
    [
        ("codesign-homebrew.txt", False, Severity.OK),
        ("codesign-developer-id.txt", False, Severity.OK),
        ("codesign-anonymous.txt", False, Severity.PROBLEM),
        ("codesign-anonymous.txt", True, Severity.WARNING),
        ("codesign-unsigned.txt", False, Severity.PROBLEM),
    ],
)
def test_interpreter(view: View, name: str, launchd: bool, severity: Severity) -> None:
    system = FakeSystem({"/usr/bin/codesign -dv": Printed(recording(name), "status 1")})
    found = by_id(interpreter.check(system, replace(view, launchd=launchd, executable="/opt/py thon")))
    assert found["interpreter.signature"].severity is severity
    if severity is not Severity.OK:
        assert found["interpreter.signature"].command.endswith("-i org.sealring.python '/opt/py thon'")


@pytest.mark.parametrize(
    ("says", "severity", "command"),
    [
        ({"--getglobalstate": "Firewall is disabled. (State = 0)"}, Severity.OK, ""),
        ({"--getglobalstate": "(State = 2)"}, Severity.PROBLEM, "--setblockall off"),
        (
            {"--getglobalstate": "(State = 1)", "--getblockall": "Block all ENABLED!"},
            Severity.PROBLEM,
            "--setblockall off",
        ),
        (
            {"--getglobalstate": "(State = 1)", "--listapps": recording("firewall-apps.txt")},
            Severity.PROBLEM,
            "--unblockapp",
        ),
        (
            {"--getglobalstate": "(State = 1)", "--listapps": "(none)"},
            Severity.WARNING,
            "--add",
        ),
        ({"--getglobalstate": "(State = 1)"}, Severity.NOTE, "--listapps"),
        (
            {"--getglobalstate": "(State = 1)", "--listapps": "1 : /opt\n (Allow incoming connections)\n"},
            Severity.OK,
            "",
        ),
        (
            {"--getglobalstate": "(State = 1)", "--listapps": f"{PYTHON}\n(Allow incoming connections)\n"},
            Severity.OK,
            "",
        ),
        (
            {
                "--getglobalstate": "(State = 1)",
                "--listapps": f"{PYTHON}\n(Allow incoming connections)\n/opt\n(Block incoming connections)\n",
            },
            Severity.PROBLEM,
            "--unblockapp",
        ),
    ],
)
def test_firewall(view: View, says: dict[str, str], severity: Severity, command: str) -> None:
    system = FakeSystem({f"{firewall.SOCKETFILTERFW} {verb}": text for verb, text in says.items()})
    found = by_id(firewall.check(system, view))["firewall.state"]
    assert found.severity is severity
    assert command in found.command


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("sleep 0", {"power.sleep": Severity.OK}),
        ("sleep 1", {"power.sleep": Severity.WARNING}),
        ("sleep 1\nSleepDisabled 1", {"power.sleep": Severity.OK}),
        ("sleep 1\nSleepDisabled 0", {"power.sleep": Severity.WARNING}),
        ("SleepDisabled 0", {"power.sleep": Severity.OK}),
        ("powermode 1", {"power.low_power_mode": Severity.WARNING}),
        ("lowpowermode 0\npowermode 2", {}),
        ("powernap 1", {}),
        ("powernap 1\nsleep 0", {"power.sleep": Severity.OK}),
    ],
)
def test_power_settings(view: View, settings: str, expected: dict[str, Severity]) -> None:
    found = power.check(FakeSystem({"/usr/bin/pmset -g": settings}), view)
    assert {one.id: one.severity for one in found if "could not tell" not in one.what} == expected


@pytest.mark.parametrize(
    ("total", "limit", "severity", "raised"),
    [
        (64, 0, Severity.OK, ""),
        (64, 61440, Severity.NOTE, ""),
        (64, 61441, Severity.WARNING, "61440"),
        (6, 6000, Severity.WARNING, "3072"),
    ],
)
def test_wired_limit(view: View, total: int, limit: int, severity: Severity, raised: str) -> None:
    found = by_id(memory.check(FakeSystem({"/usr/sbin/sysctl -n": f"{limit}\n"}, memory=total << 30), view))
    assert list(found) == ["memory.wired_limit"]
    assert found["memory.wired_limit"].severity is severity
    assert found["memory.wired_limit"].command.rpartition("=")[2] == raised


@pytest.mark.parametrize(("limit", "above"), [("0", False), ("51199", True), ("51200", False), ("?", False)])
def test_a_setting_above_the_wired_limit(view: View, limit: str, above: bool) -> None:
    settings = view.settings.model_copy(update={"memory_limit": 50 << 30})
    found = by_id(memory.check(FakeSystem({"/usr/sbin/sysctl -n": limit}), replace(view, settings=settings)))
    command = found["memory.setting"].command if "memory.setting" in found else ""
    assert command == ("sudo /usr/sbin/sysctl iogpu.wired_limit_mb=51200" if above else "")


def test_thunderbolt(view: View) -> None:
    found = by_id(thunderbolt.check(FakeSystem(NETWORK), view))
    assert list(found) == ["thunderbolt.ports"]
    assert found["thunderbolt.ports"].what == "other Macs at Thunderbolt port 3 (en4, 80 Gb/s)"
    alone = {**NETWORK, "/usr/sbin/system_profiler": json.dumps({"SPThunderboltDataType": [{}, {}]})}
    found = by_id(thunderbolt.check(FakeSystem(alone), view))
    assert [one.what for one in found.values()] == ["no other Mac at the 2 Thunderbolt ports"]


def test_what_a_port_does_not_tell_is_a_question_mark(view: View) -> None:
    bus = {"domain_uuid_key": "A", "_items": [{"domain_uuid_key": "B"}, {"domain_uuid_key": "C"}]}
    says = {**NETWORK, "/usr/sbin/system_profiler": json.dumps({"SPThunderboltDataType": [bus]})}
    found = by_id(thunderbolt.check(FakeSystem(says), view))
    assert found["thunderbolt.ports"].what == "other Macs at Thunderbolt port ? (?, )"
    assert found["thunderbolt.device"].what == "Thunderbolt port ? has no network interface that is known"
    (port,) = thunderbolt.read_ports(FakeSystem(says)) or ()
    assert (port.uuid, port.peer) == ("A", "B")


def test_bridges_and_their_services() -> None:
    """A bridge is on where its interface is up and its service, if it has one, is enabled."""

    def enabled(
        services: str = NETWORK["/usr/sbin/networksetup -listnetworkserviceorder"], flags: str = "UP"
    ) -> bool:
        interfaces = f"bridge0: flags=8863<{flags},BROADCAST> mtu 1500\n\tmember: en2 flags=3<LEARNING>\n"
        changed = {
            "/usr/sbin/networksetup -listnetworkserviceorder": services,
            "/sbin/ifconfig -a": interfaces,
        }
        (bridge,) = thunderbolt.read_bridges(FakeSystem(NETWORK | changed))
        return bridge.enabled

    assert enabled()
    assert enabled(services="")
    assert not enabled(flags="DOWN")


@pytest.mark.parametrize("missing", ["ifconfig", "hardwareports"])
def test_bridges_that_cannot_be_told(view: View, missing: str) -> None:
    says = {name: text for name, text in NETWORK.items() if missing not in name}
    found = by_id(thunderbolt.check(FakeSystem(says), view))
    assert found["thunderbolt.bridge"].what == "could not tell: bridges over Thunderbolt"
    assert found["thunderbolt.bridge"].why.endswith("is not on this machine")


@pytest.mark.parametrize("named", ["/a'; rm -rf ~; '/python", "relative/python"])
def test_a_daemon_can_have_nothing_else_pasted(view: View, named: str) -> None:
    """What it says that it is stands in commands that people paste, with sudo at times."""
    view = replace(view, executable=named)
    says = {"--getglobalstate": "(State = 1)", "--listapps": ""}
    system = FakeSystem(
        {
            "/usr/bin/codesign -dv": recording("codesign-unsigned.txt"),
            **{f"{firewall.SOCKETFILTERFW} {verb}": text for verb, text in says.items()},
        }
    )
    found = [*interpreter.check(system, view), *firewall.check(system, view)]
    expected = named if named.startswith("/") else PYTHON
    for one in found:
        words = shlex.split(one.command)
        assert words.count(expected) == one.command.count("--") or words[-1] == expected
        assert "rm" not in words


def test_a_bridge_over_two_cables_is_named(view: View) -> None:
    profile = recording("thunderbolt.json").replace(
        '"_items" : [ { "_name" : "MacBook Pro", "domain_uuid_key"',
        '"domain_uuid_key" : "B", "_inner" : [ { "x"',
    )
    system = FakeSystem({**NETWORK, "/usr/sbin/system_profiler": profile})
    found = by_id(thunderbolt.check(system, view))
    assert found["thunderbolt.bridge"].command == "sealring doctor --cluster"
    off = recording("services.txt").replace("(2) Thunderbolt", "(*) Thunderbolt")
    system = FakeSystem({**system.says, "/usr/sbin/networksetup -listnetworkserviceorder": off})
    assert "thunderbolt.bridge" not in by_id(thunderbolt.check(system, view))


@pytest.mark.parametrize(
    ("version", "status", "severity", "words"),
    [
        ("26.1", "", Severity.OK, "begins with macOS 26.2"),
        ("?", "disabled", Severity.OK, "is off"),
        ("26.2", "disabled", Severity.OK, "is off"),
        ("26.10", "enabled", Severity.NOTE, "rdma_en2, rdma_en3"),
        ("26.2", "whatever", Severity.NOTE, "could not tell"),
    ],
)
def test_rdma(view: View, version: str, status: str, severity: Severity, words: str) -> None:
    says = {
        "/usr/bin/sw_vers": recording("sw_vers.txt").replace("26.2", version),
        "/usr/bin/rdma_ctl": status,
        "/usr/bin/ibv_devices": recording("ibv_devices.txt"),
    }
    found = by_id(rdma.check(FakeSystem(says), view))["rdma.status"]
    assert found.severity is severity
    assert words in found.what
    if status == "enabled":
        says["/usr/bin/ibv_devices"] = ""
        none = by_id(rdma.check(FakeSystem(says), view))["rdma.status"]
        assert none.what == "RDMA over Thunderbolt is on (no device)"


@pytest.mark.parametrize("named", [True, False])
def test_thunderbolt_4_has_no_rdma_whatever_its_tool_says(tmp_path: Path, named: bool) -> None:
    lines = ["a" * 16 + "=rdma_en2"] if named else []
    view = View(NodeSettings(state_dir=tmp_path, rdma_devices=lines))
    slow = re.sub(r"(Up to )?[0-9]+ Gb/s", "Up to 40 Gb/s", recording("thunderbolt.json"))
    says = {
        **NETWORK,
        "/usr/bin/sw_vers": recording("sw_vers.txt"),
        "/usr/bin/rdma_ctl": "enabled",
        "/usr/bin/ibv_devices": "",
        "/usr/sbin/system_profiler": slow,
    }
    system = FakeSystem(says)
    assert rdma.status(system) == "impossible", "so that no plan names its devices"
    (found,) = rdma.check(system, view)
    assert "its Thunderbolt ports are slower than Thunderbolt 5" in found.what
    assert found.severity is (Severity.PROBLEM if named else Severity.OK)
    for other in ({"/usr/bin/ibv_devices": recording("ibv_devices.txt")}, {"/usr/sbin/system_profiler": ""}):
        assert rdma.status(FakeSystem(says | other)) == "enabled", "it shows a device, or no speed"


@pytest.mark.parametrize(("version", "here"), [("26.2", False), ("27.0", True)])
def test_where_rdma_is_turned_on(tmp_path: Path, version: str, here: bool) -> None:
    view = View(NodeSettings(state_dir=tmp_path, rdma_devices=["a" * 16 + "=rdma_en2"]))
    says = {
        "/usr/bin/sw_vers": recording("sw_vers.txt").replace("26.2", version),
        "/usr/bin/rdma_ctl": "disabled",
    }
    (found,) = rdma.check(FakeSystem(says), view)
    assert "recovery system" in found.fix
    assert ("if it refuses" in found.fix) == here


def test_a_bridge_that_took_the_default_route_is_named(view: View) -> None:
    for interface, named in (("bridge0", True), ("en0", False)):
        system = FakeSystem({**NETWORK, "/sbin/route": recording("route.txt").replace("en0", interface)})
        assert ("thunderbolt.default_route" in by_id(thunderbolt.check(system, view))) == named


@pytest.mark.parametrize(
    ("devices", "changes", "words"),
    [
        ("rdma_en2 rdma_en3", {}, ""),
        ("rdma_en2", {"26.2": "26.1"}, "begins with macOS 26.2"),
        ("rdma_en2", {"enabled": "disabled"}, "is off"),
        ("rdma_en4", {}, "names rdma_en4, and this Mac has none"),
        ("rdma_en2", {"member: en9": "member: en2"}, "en2 of rdma_en2 is in bridge0"),
        ("rdma_en3", {"inet 10.0.3.1 ": "inet6 fe80::1 "}, "en3 of rdma_en3 has no IPv4 address"),
        (
            "rdma_en2",
            {"member: en9": "member: en2", "<UP,BROADCAST> mtu 1500\n\tmember": "<> mtu 1500\n\tmember"},
            "",
        ),
        ("rdma_en3", {"/sbin/ifconfig": ""}, ""),
    ],
)
def test_the_devices_of_the_settings_are_ready_for_jaccl(
    tmp_path: Path, devices: str, changes: dict[str, str], words: str
) -> None:
    lines = [f"{letter * 16}={device}" for letter, device in zip("ab", devices.split(), strict=False)]
    view = View(NodeSettings(state_dir=tmp_path, rdma_devices=lines))
    says = {
        "/usr/bin/sw_vers": recording("sw_vers.txt"),
        "/usr/bin/rdma_ctl": "enabled",
        "/usr/bin/ibv_devices": recording("ibv_devices.txt"),
        "/sbin/ifconfig": "".join(
            f"{name}: flags=8863<UP,BROADCAST> mtu 1500\n{rest}"
            for name, rest in (
                ("en2", "\tinet 10.0.2.1 netmask 0xfffffffc\n"),
                ("en3", "\tinet 10.0.3.1 netmask 0xfffffffc\n"),
                ("bridge0", "\tmember: en9 flags=3<LEARNING,DISCOVER>\n"),
            )
        ),
    }
    for before, after in changes.items():
        says = {program: text.replace(before, after) for program, text in says.items() if program != before}
    found = by_id(rdma.check(FakeSystem(says), view))
    if not words:
        assert found["rdma.devices"].severity is Severity.OK
        assert "rdma.unready" not in found
    else:
        assert "rdma.devices" not in found
        assert found["rdma.unready"].severity is Severity.PROBLEM
        assert words in found["rdma.unready"].what


def test_versions(view: View) -> None:
    system = FakeSystem({"/usr/bin/sw_vers": recording("sw_vers.txt")})
    found = by_id(versions.check(system, view))["versions.installed"]
    assert found.severity is Severity.OK
    assert "darwin 26.2 (25C56)" in found.what
    broken = by_id(versions.check(FakeSystem(packages={"mlx": "1"}), view))["versions.installed"]
    assert broken.severity is Severity.PROBLEM
    assert broken.what == "not installed: mlx-lm, sealring"
    other = by_id(versions.check(FakeSystem(platform="linux"), view))["versions.installed"]
    assert other.what.endswith(f" on linux {platform.release()}")


@pytest.mark.parametrize(
    ("limit", "severity"),
    [(0, Severity.WARNING), (2047, Severity.WARNING), (2048, Severity.OK), (-1, Severity.OK)],
)
def test_open_files(view: View, limit: int, severity: Severity) -> None:
    assert by_id(check_open_files(FakeSystem(file_limit=limit), view))["files.limit"].severity is severity
    other = replace(view, file_limit=4096)
    assert by_id(check_open_files(FakeSystem(file_limit=limit), other))["files.limit"].severity is Severity.OK


@pytest.mark.parametrize(
    ("free", "severity", "words"),
    [
        ((1 << 30) - 1, Severity.PROBLEM, "1.0 GiB free for "),
        (1 << 30, Severity.WARNING, "1.0 GiB free for "),
        ((10 << 30) - 1, Severity.WARNING, "10.0 GiB free for "),
        (10 << 30, Severity.OK, "10.0 GiB free for "),
        (None, Severity.NOTE, "could not tell"),
    ],
)
def test_disk(view: View, free: int | None, severity: Severity, words: str) -> None:
    system = FakeSystem(free_space=None if free is None else (free, 1 << 40))
    found = by_id(check_storage(system, view))
    assert found["disk.space"].severity is severity
    assert found["disk.space"].what.startswith(words)
    assert found["models.folders"].what == "no model folder is set"


@pytest.mark.parametrize(
    ("folder", "severity", "command"),
    [
        (None, Severity.PROBLEM, "mkdir"),
        (Folder(False, 0, False, why="EACCES"), Severity.PROBLEM, "chmod"),
        (Folder(False, -1, False, why="EPERM"), Severity.PROBLEM, "chmod"),
        (Folder(False, -1, False, why="EIO"), Severity.PROBLEM, "df"),
        (Folder(True, 0, True), Severity.WARNING, "chown"),
        (Folder(True, 777, False), Severity.WARNING, "chown"),
        (Folder(True, 501, True), Severity.WARNING, "chown"),
        (Folder(True, 0, False, 3), Severity.OK, ""),
        (Folder(True, 501, False, 3), Severity.OK, ""),
    ],
)
def test_model_folders(view: View, folder: Folder | None, severity: Severity, command: str) -> None:
    view = replace(view, settings=view.settings.model_copy(update={"models": [Path("/models")]}))
    found = by_id(check_storage(FakeSystem(folder=folder), view))["models.folders"]
    assert found.severity is severity
    assert command in found.command


def test_trust_of_a_mac(view: View) -> None:
    found = by_id(trust.check(FakeSystem(posture=GOOD), view))
    assert "self_signed" in found["trust.possible"].what
    lacking = replace(GOOD, filevault=False, sip=None)
    found = by_id(trust.check(FakeSystem(posture=lacking), view))
    assert set(found) == {"trust.possible", "trust.filevault", "trust.sip"}
    assert found["trust.filevault"].command == "sudo fdesetup enable"
    assert found["trust.filevault"].what == "FileVault is off"
    assert "could not be determined" in found["trust.sip"].what


@pytest.mark.parametrize(
    ("error", "severity", "what"),
    [
        ("", Severity.OK, "the daemon can listen on 127.0.0.1:7710"),
        ("EADDRINUSE", Severity.PROBLEM, "port 7710 of 127.0.0.1 is in use by another process"),
        ("EADDRNOTAVAIL", Severity.PROBLEM, "the daemon cannot listen on 127.0.0.1: EADDRNOTAVAIL"),
    ],
)
def test_ports_of_a_node_that_does_not_run(view: View, error: str, severity: Severity, what: str) -> None:
    state: Any = object()
    found = by_id(check_reach(FakeSystem(bind_error=error), replace(view, state=state)))
    assert (found["ports.listen"].severity, found["ports.listen"].what) == (severity, what)
    assert found["ports.ring_host"].severity is severity
    if not error:
        assert found["ports.ring_host"].what == f"the daemon can listen on {view.settings.ring_host}"


def test_a_machine_in_no_cluster_is_shown_how_to_make_one_and_no_port(view: View) -> None:
    """`up` and `join` choose a port that is free."""
    found = by_id(check_reach(FakeSystem(bind_error="EADDRINUSE"), view))
    assert {name: one.severity for name, one in found.items()} == {"enrolment.state": Severity.NOTE}
    assert found["enrolment.state"].command == "sealring up"


@pytest.mark.parametrize(("first", "command"), [(True, "sealring up"), (False, "sealring join")])
def test_the_first_machine_is_started_by_up_and_another_one_by_join(
    tmp_path: Path, first: bool, command: str
) -> None:
    if first:
        (tmp_path / "coordinator/operator").mkdir(parents=True)
        (tmp_path / "coordinator/operator/member.json").write_text("{}")
    view = read_view(NodeSettings(state_dir=tmp_path / "node"))
    assert by_id(check_storage(FakeSystem(), view))["models.folders"].command == f"{command} --models FOLDER"


def test_an_enrolment_that_cannot_be_read_says_as_whom_to_run(view: View) -> None:
    found = by_id(check_reach(FakeSystem(), replace(view, trouble="it belongs to another")))
    assert found["enrolment.state"].severity is Severity.PROBLEM
    assert found["enrolment.state"].command == "sudo -u _sealring sealring doctor"


@pytest.mark.parametrize(
    ("chip", "tag", "version", "warned"),
    [
        ("Apple M5 Max", "py3-none-macosx_15_0_arm64", "26.2", True),
        ("Apple M6", "py3-none-macosx_14_0_arm64", "27.0", True),
        ("Apple M5", "py3-none-macosx_26_0_arm64", "26.2", False),
        ("Apple M5", "py3-none-macosx_15_0_arm64", "15.7", False),
        ("Apple M4 Pro", "py3-none-macosx_15_0_arm64", "26.2", False),
        ("Apple M5", "", "26.2", False),
        ("", "py3-none-macosx_15_0_arm64", "?", False),
    ],
)
def test_an_mlx_that_leaves_a_part_of_the_gpu_unused(
    view: View, chip: str, tag: str, version: str, warned: bool
) -> None:
    says = {
        "/usr/bin/sw_vers": recording("sw_vers.txt").replace("26.2", version),
        "/usr/sbin/sysctl -n machdep.cpu.brand_string": chip,
    }
    found = by_id(versions.check(FakeSystem(says, wheel_tag=tag), view))
    assert ("versions.mlx_wheel" in found) == warned
    if warned:
        assert found["versions.mlx_wheel"].severity is Severity.WARNING
        assert tag in found["versions.mlx_wheel"].what
