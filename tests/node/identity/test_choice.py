"""The identity that a machine chooses by itself: the best that it can prove."""

from __future__ import annotations

import functools
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import appletest
import pytest
from appletest import SERIAL, DeviceAuthority
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.mesh.crypto import Label, SoftwareSigner, private_pem, verify
from sealring.mesh.errors import ConfigError, Unavailable
from sealring.mesh.trust.apple import verify_device
from sealring.mesh.trust.attestation import Posture
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.identity import choice
from sealring.node.identity.choice import (
    ENCLAVE_KEY,
    HELPER,
    choose_identity,
    load_signer,
    make_signer,
    read_device_chain,
)
from sealring.node.settings import NodeSettings

STANDIN = Path(__file__).parents[2] / "support" / "enclave_standin.py"
GOOD = replace(appletest.GOOD, serial=SERIAL)


@pytest.fixture
def posture() -> list[Posture]:
    """What the machine says of itself, last."""
    return [GOOD]


@pytest.fixture
def mac(tmp_path: Path, posture: list[Posture], monkeypatch: pytest.MonkeyPatch) -> NodeSettings:
    """Settings of a machine with the helper beside its Python, and everything on."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / HELPER).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    (commands / HELPER).chmod(0o755)
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / ENCLAVE_KEY).write_bytes(b"well\n" + private_pem(key))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(commands))
    monkeypatch.setattr(choice, "measure_posture", lambda *, serial: posture[-1])
    return NodeSettings(state_dir=folder)


def test_without_a_helper_it_is_software(tmp_path: Path) -> None:
    found = choose_identity(NodeSettings(state_dir=tmp_path / "node"))
    assert (found.level, found.helper) == (TrustLevel.SOFTWARE, None)
    assert found.why.startswith("the key is in a file: ")


def test_a_key_in_the_enclave_is_self_signed(mac: NodeSettings) -> None:
    found = choose_identity(mac)
    assert found.level is TrustLevel.SELF_SIGNED
    assert found.helper is not None
    assert stat.S_ISREG(found.helper.stat().st_mode)
    assert "device_attestation" in found.why


@pytest.mark.parametrize(
    ("change", "words"),
    [({"filevault": None}, "FileVault"), ({"sip": False}, "System Integrity"), ({"chip": None}, "chip")],
)
def test_what_is_off_or_unknown_is_named(
    mac: NodeSettings, posture: list[Posture], change: dict[str, Any], words: str
) -> None:
    posture.append(replace(GOOD, **change))
    found = choose_identity(mac)
    assert found.level is TrustLevel.SOFTWARE
    assert found.helper is not None, "the key stays in the enclave all the same"
    assert words in found.why


def test_with_apples_attestation_it_is_hardware(
    mac: NodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = DeviceAuthority(time.time())
    signer = make_signer(mac.model_copy(update={"enclave_helper": tmp_path / "bin" / HELPER}))
    chain = authority.chain(signer.public_key)
    signer.close()  # type: ignore[attr-defined]
    file = tmp_path / "device.pem"
    file.write_bytes(
        b"".join(x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM) for der in chain)
    )
    named = mac.model_copy(update={"device_attestation": file})
    found = choose_identity(named)
    assert found.level is TrustLevel.SELF_SIGNED, "its root is not Apple's"
    assert "does not count" in found.why
    trusting = functools.partial(verify_device, root=authority.root)
    monkeypatch.setattr(choice, "verify_device", trusting)
    found = choose_identity(named)
    assert (found.level, found.why) == (TrustLevel.HARDWARE, "")


def test_a_helper_that_fails_is_passed_over_unless_it_was_named(mac: NodeSettings, tmp_path: Path) -> None:
    (mac.state_dir / ENCLAVE_KEY).write_bytes(b"not a key\n")
    found = choose_identity(mac)
    assert (found.level, found.helper) == (TrustLevel.SOFTWARE, None)
    assert "Secure Enclave helper failed" in found.why
    with pytest.raises(Unavailable):
        choose_identity(mac.model_copy(update={"enclave_helper": tmp_path / "bin" / HELPER}))


STANDIN = Path(__file__).parents[2] / "support" / "enclave_standin.py"


def test_without_a_helper_the_key_is_in_a_file(tmp_path: Path) -> None:
    settings = NodeSettings(state_dir=tmp_path)
    with pytest.raises(FileNotFoundError):
        load_signer(settings)
    made = make_signer(settings)
    assert made.key_type == "software"
    assert load_signer(settings).public_key == made.public_key


def test_with_a_helper_the_key_is_in_the_enclave(tmp_path: Path) -> None:
    helper = tmp_path / "helper"
    helper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    helper.chmod(0o755)
    settings = NodeSettings(state_dir=tmp_path / "node", enclave_helper=helper)
    with pytest.raises(FileNotFoundError):
        load_signer(settings)
    (tmp_path / "node").mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "node" / ENCLAVE_KEY).write_bytes(b"well\n" + private_pem(key))
    for open_signer in (make_signer, load_signer):
        signer = open_signer(settings)
        assert signer.key_type == "secure_enclave"
        verify(signer.public_key, Label.JOIN, b"x", signer.sign(Label.JOIN, b"x"))
        signer.close()  # type: ignore[attr-defined]


def test_a_device_attestation_is_read(tmp_path: Path) -> None:
    assert read_device_chain(None) == ()
    chain = DeviceAuthority(time.time()).chain(SoftwareSigner.generate().public_key)
    file = tmp_path / "device.pem"
    pems = [x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM) for der in chain]
    file.write_bytes(b"".join(pems))
    assert read_device_chain(file) == chain


@pytest.mark.parametrize(
    "content", [None, b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n", b"x" * 40000]
)
def test_a_file_that_holds_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "device.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_device_chain(file)
    assert caught.value.reason == "BAD_DEVICE_ATTESTATION"
