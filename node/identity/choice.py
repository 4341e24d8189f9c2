"""The identity key of this node, and the choice of the best identity that this machine can have."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.mesh.crypto.identity import Signer, SoftwareSigner
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.errors import AttestationError, ConfigError, Unavailable
from sealring.mesh.member.state import IDENTITY_KEY
from sealring.mesh.system.files import read_bounded
from sealring.mesh.trust.apple import Device, verify_device
from sealring.mesh.trust.attestation import Posture, Statement, derive_level
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.identity.attestor import measure_posture
from sealring.node.identity.enclave import EnclaveSigner
from sealring.node.settings import NodeSettings

ENCLAVE_KEY = "identity.enclave"
_MAX_CHAIN_BYTES = 32 << 10


def make_signer(settings: NodeSettings) -> Signer:
    """The key, made first if there is none; blocks. Raises Unavailable (ENCLAVE_FAILED), ConfigError."""
    folder = settings.state_dir
    if settings.enclave_helper is None:
        return SoftwareSigner.load_or_create(folder / IDENTITY_KEY)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return EnclaveSigner(settings.enclave_helper, folder / ENCLAVE_KEY)


def load_signer(settings: NodeSettings) -> Signer:
    """The key that was made before; blocks. Raises FileNotFoundError, Unavailable, ConfigError."""
    folder = settings.state_dir
    if settings.enclave_helper is None:
        return SoftwareSigner.load(folder / IDENTITY_KEY)
    if not (folder / ENCLAVE_KEY).exists():
        raise FileNotFoundError(folder / ENCLAVE_KEY)
    return EnclaveSigner(settings.enclave_helper, folder / ENCLAVE_KEY)


def read_device_chain(file: Path | None) -> tuple[bytes, ...]:
    """Apple's attestation of this Mac (PEM, leaf first) as DER; empty without a file.

    Raises ConfigError (BAD_DEVICE_ATTESTATION).
    """
    if file is None:
        return ()
    try:
        found = x509.load_pem_x509_certificates(read_bounded(file, max_bytes=_MAX_CHAIN_BYTES))
    except (OSError, ValueError, ConfigError, x509.InvalidVersion):
        raise ConfigError(
            f"{file} holds no certificates",
            hint="store the certificates of the device attestation there as PEM, leaf first",
            reason="BAD_DEVICE_ATTESTATION",
        ) from None
    return tuple(certificate.public_bytes(Encoding.DER) for certificate in found)


HELPER = "sealring-enclave"
_PROTECTIONS = {
    "sip": "System Integrity Protection",
    "secure_boot": "Secure Boot at full security",
    "authenticated_root": "the sealed system volume",
    "filevault": "FileVault",
}


@dataclass(frozen=True)
class IdentityChoice:
    """`level` is the trust level that the evidence gives; `why` is the reason for no higher one ("" for the
    highest); `helper` is the Secure Enclave helper that holds the key, None for a key in a file."""

    level: TrustLevel
    helper: Path | None
    why: str


def choose_identity(settings: NodeSettings) -> IdentityChoice:
    """Tries the Secure Enclave, then what this machine can prove about itself; blocks for seconds on a Mac.

    A key that it tries is made in the state folder, where a join then finds it. Raises Unavailable
    (ENCLAVE_FAILED) when the helper that the settings name fails, ConfigError (BAD_DEVICE_ATTESTATION).
    """
    helper = settings.enclave_helper or next(_helpers(), None)
    if helper is None:
        where = "there is no Secure Enclave helper here" if sys.platform == "darwin" else "this is no Mac"
        return IdentityChoice(TrustLevel.SOFTWARE, None, f"the key is in a file: {where}")
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        signer = EnclaveSigner(helper, settings.state_dir / ENCLAVE_KEY)
        signer.close()
    except Unavailable as error:
        if settings.enclave_helper is not None:
            raise
        return IdentityChoice(TrustLevel.SOFTWARE, None, f"the key is in a file: {error.message}")
    chain = read_device_chain(settings.device_attestation)
    posture = measure_posture(serial=bool(chain))
    device, unverified = _device(chain, signer.public_key)
    statement = Statement(
        cluster="",
        nonce=b"",
        timestamp=0,
        identity_key=signer.public_key,
        key_type=KeyType(signer.key_type),
        sealing_key=b"",
        manifest_hash=b"",
        posture=posture,
    )
    level = derive_level(statement, device)
    why = {
        TrustLevel.SOFTWARE: f"the key is in the Secure Enclave, but {_lacking(posture)}",
        TrustLevel.SELF_SIGNED: f"the key is in the Secure Enclave; {unverified}",
    }
    return IdentityChoice(level, helper, why.get(level, ""))


def _helpers() -> Iterator[Path]:
    """Default places of the helper: beside this Python's commands, and on a Mac the one of deploy/enclave."""
    folders = [Path(sysconfig.get_path("scripts"))]
    if sys.platform == "darwin":
        folders.append(Path("/usr/local/sealring/bin"))
    for folder in folders:
        if os.access(folder / HELPER, os.X_OK):
            yield folder / HELPER


def _device(chain: tuple[bytes, ...], identity_key: bytes) -> tuple[Device | None, str]:
    if not chain:
        return None, "nothing of Apple's vouches for this Mac (device_attestation)"
    try:
        return verify_device(chain, identity_key, now=time.time()), "the serial number is another Mac's"
    except AttestationError as error:
        return None, f"Apple's attestation does not count: {error.message}"


def _lacking(posture: Posture) -> str:
    off = [what for name, what in _PROTECTIONS.items() if getattr(posture, name) is not True]
    if off:
        return f"not on, or not known to be: {', '.join(off)}"
    return "this machine does not tell its model, chip, system version or boot session"
