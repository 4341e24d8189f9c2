"""A machine's own statement, from tools that run as processes and answer as those of macOS do."""

import plistlib
import sys
from pathlib import Path

import pytest
from macs_tools import ANSWERS, BOOT, FILEVAULT, SIP, Tools

from sealring.mesh.errors import PermissionDenied
from sealring.mesh.trust.attestation import Posture
from sealring.node.identity import attestor
from sealring.node.identity.attestor import Attestor

MODEL = "usr/sbin/sysctl -n hw.model"


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@pytest.fixture
def mac(tools: Tools) -> Attestor:
    return Attestor(system="darwin", root=tools.root)


def test_a_macs_facts(mac: Attestor) -> None:
    found = mac.measure()
    assert found == Posture(
        hardware_model="Mac16,5",
        chip="Apple M4 Max",
        os_version="26.1",
        boot_session="4C1F",
        sip=True,
        secure_boot=True,
        authenticated_root=True,
        filevault=True,
    )
    assert mac.measure(serial=True).serial == "C02TEST12345"


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
    tools: Tools, mac: Attestor, answer: str, value: bool | None
) -> None:
    tools.say(BOOT, answer)
    assert mac.measure().secure_boot is value


TABLE = "System/Library/SystemProfiler/SPiBridgeReporter.spreporter/Contents/Resources/Localizable.loctable"
TRANSLATIONS = {
    "LocProvenance": {"fr": 1},
    "en": {"Full Security": "Full Security", "ibridge_secure_boot": "Secure Boot"},
    "fr": {"Full Security": "Sécurité maximale", "Medium Security": "Sécurité normale"},
    "de": {"Full Security": "Volle Sicherheit", "No Security": "Keine Sicherheit"},
    "xx": {"Full Security": "Sicher", "Reduced Security": "Sicher"},
    "yy": {"Medium Security": "Halb", "Reduced Security": "Halb"},
    "zz": {"Full Security": "An", "ibridge_on": "An"},
}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("Sécurité maximale", True),
        ("Volle Sicherheit", True),
        ("Sécurité normale", False),
        ("Keine Sicherheit", False),
        ("Halb", False),
        ("Sicher", None),
        ("An", None),
        ("Secure Boot", None),
        ("Sécurité", None),
    ],
)
def test_the_boot_policy_is_read_in_any_language(
    tools: Tools, mac: Attestor, words: str, value: bool | None
) -> None:
    """By macOS's own translations; words with two meanings are unknown."""
    file = tools.root / TABLE
    file.parent.mkdir(parents=True)
    file.write_bytes(plistlib.dumps(TRANSLATIONS, fmt=plistlib.FMT_BINARY))
    tools.say(BOOT, f'{{"SPiBridgeDataType": [{{"ibridge_secure_boot": "{words}"}}]}}')
    assert mac.measure().secure_boot is value


@pytest.mark.parametrize("content", [b"", b"bplist00" + bytes(40), b"<plist>", plistlib.dumps([1])])
def test_translations_that_cannot_be_read_leave_it_unknown(
    tools: Tools, mac: Attestor, content: bytes
) -> None:
    file = tools.root / TABLE
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    tools.say(BOOT, '{"SPiBridgeDataType": [{"ibridge_secure_boot": "Volle Sicherheit"}]}')
    assert mac.measure().secure_boot is None


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
def test_only_exact_words_count(tools: Tools, mac: Attestor, answer: str, value: bool | None) -> None:
    tools.say(SIP, answer)
    assert mac.measure().sip is value


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    found = Attestor(system="darwin", root=tmp_path).measure(serial=True)
    assert found == Posture(os_version=found.os_version)


def test_what_only_a_restart_changes_is_asked_until_it_is_known(tools: Tools, mac: Attestor) -> None:
    tools.once(BOOT, "exit 1")
    assert mac.measure().secure_boot is True
    assert tools.asked(BOOT) == 2, "once more"
    for command in ANSWERS:
        tools.say(command, "")
    tools.say(FILEVAULT, "FileVault is Off.")
    found = mac.measure()
    assert (found.sip, found.secure_boot, found.authenticated_root, found.chip) == (
        *[True] * 3,
        "Apple M4 Max",
    )
    assert found.filevault is False, "which can be turned off at any time"
    assert (tools.asked(BOOT), tools.asked(MODEL), tools.asked(FILEVAULT)) == (2, 1, 2)
    tools.say(FILEVAULT, "")
    assert mac.measure().filevault is None


def test_a_tool_that_hangs_holds_up_no_other(
    tools: Tools, mac: Attestor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attestor, "SECONDS", 5.0)
    tools.once(BOOT, "exec /bin/sleep 1000")
    found = mac.measure()
    assert (found.secure_boot, found.sip, found.boot_session) == (None, True, "4C1F")
    assert mac.measure().secure_boot is True


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
