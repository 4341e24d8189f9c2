"""Where a node's identity comes from, and a node that joins and serves with an enclave's stand-in."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from appletest import DeviceAuthority
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.mesh.crypto.identity import SoftwareSigner, private_pem, verify
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import ConfigError
from sealring.node.identity.key import ENCLAVE_KEY, load_signer, make_signer, read_device_chain
from sealring.node.settings import NodeSettings

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
