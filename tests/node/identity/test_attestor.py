import subprocess
import sys

import pytest

from sealring.mesh.errors import PermissionDenied
from sealring.mesh.trust.attestation import Posture
from sealring.node.identity import attestor

ANSWERS = {
    ("/usr/sbin/sysctl", "-n", "hw.model"): "Mac16,5\n",
    ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"): "Apple M4 Max\n",
    ("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"): "4C1F\n",
    ("/usr/bin/csrutil", "status"): "System Integrity Protection status: enabled.\n",
    ("/usr/bin/csrutil", "authenticated-root", "status"): "Authenticated Root status: enabled\n",
    ("/usr/bin/fdesetup", "status"): "FileVault is On.\n",
    ("/usr/sbin/system_profiler", "-json", "SPiBridgeDataType"): """{
  "SPiBridgeDataType" : [
    {
      "_name" : "Controller Information",
      "ibridge_boot_uuid" : "A904AC62-589E-450B-8829-96ADA16DE3DC",
      "ibridge_build" : "mBoot-18000.120.36",
      "ibridge_model_identifier_top" : "Mac16,5",
      "ibridge_sb_boot_args" : "Enabled",
      "ibridge_sb_ctrr" : "Enabled",
      "ibridge_sb_device_mdm" : "No",
      "ibridge_sb_manual_mdm" : "No",
      "ibridge_sb_other_kext" : "No",
      "ibridge_sb_sip" : "Enabled",
      "ibridge_sb_ssv" : "Enabled",
      "ibridge_secure_boot" : "Full Security"
    }
  ]
}""",
    ("/usr/sbin/system_profiler", "-json", "SPHardwareDataType"): """{
  "SPHardwareDataType" : [ { "_name" : "hardware_overview", "serial_number" : "C02TEST12345" } ]
}""",
}
BOOT = ("/usr/sbin/system_profiler", "-json", "SPiBridgeDataType")


def posture(monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, ...], str]) -> Posture:
    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[bytes]:
        if command not in answers:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, answers[command].encode())

    monkeypatch.setattr(attestor.subprocess, "run", run)
    monkeypatch.setattr(attestor.platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    monkeypatch.setattr(attestor.sys, "platform", "darwin")
    return attestor.measure_posture()


def test_a_macs_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert posture(monkeypatch, ANSWERS) == Posture(
        hardware_model="Mac16,5",
        chip="Apple M4 Max",
        os_version="26.2",
        boot_session="4C1F",
        sip=True,
        secure_boot=True,
        authenticated_root=True,
        filevault=True,
    )
    assert attestor.measure_posture().complete_and_good
    assert attestor.measure_posture(serial=True).serial == "C02TEST12345"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"SPiBridgeDataType": [{"ibridge_secure_boot": "Reduced Security"}]}', False),
        ('{"SPiBridgeDataType": [{"ibridge_secure_boot": "Permissive Security"}]}', False),
        ('{"SPiBridgeDataType": [{"ibridge_secure_boot": "Sécurité maximale"}]}', None),
        ('{"SPiBridgeDataType": [{"ibridge_secure_boot": "full security"}]}', None),
        ('{"SPiBridgeDataType": [{"ibridge_secure_boot": true}]}', None),
        ('{"SPiBridgeDataType": [{}]}', None),
        ('{"SPiBridgeDataType": []}', None),
        ('{"SPiBridgeDataType": [{"ibridge_secure_boot": "Full Security"}, {}]}', None),
        ('{"SPiBridgeDataType": [1]}', None),
        ('[{"ibridge_secure_boot": "Full Security"}]', None),
        ("[" * 4000, None),
        ("Secure Boot: Full Security", None),
        ("", None),
    ],
)
def test_only_the_exact_boot_policy_counts(
    monkeypatch: pytest.MonkeyPatch, answer: str, value: bool | None
) -> None:
    assert posture(monkeypatch, {**ANSWERS, BOOT: answer}).secure_boot is value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("System Integrity Protection status: disabled.\n", False),
        ("System Integrity Protection status: unknown (Custom Configuration).\n", None),
        ("status: enabled\n", None),
        ("", None),
        ("x" * 100_000, None),
    ],
)
def test_only_exact_words_count(monkeypatch: pytest.MonkeyPatch, answer: str, value: bool | None) -> None:
    found = posture(monkeypatch, {**ANSWERS, ("/usr/bin/csrutil", "status"): answer})
    assert found.sip is value


def test_what_is_not_known_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    assert posture(monkeypatch, {}) == Posture(os_version="26.2")


@pytest.mark.skipif(sys.platform == "darwin", reason="says what other systems say")
def test_other_systems_claim_no_protection() -> None:
    found = attestor.measure_posture()
    assert found.os_version
    protections = (found.sip, found.secure_boot, found.authenticated_root, found.filevault)
    assert protections == (None, None, None, None)
    assert not found.complete_and_good


def test_a_software_key_has_to_be_allowed() -> None:
    attestor.require_software_allowed("software", allowed=True)
    attestor.require_software_allowed("secure_enclave", allowed=False)
    with pytest.raises(PermissionDenied) as raised:
        attestor.require_software_allowed("software", allowed=False)
    assert raised.value.reason == "SOFTWARE_IDENTITY"
    assert "--software-identity-allowed" in raised.value.hint
