"""The identity key of this node: in the Secure Enclave if its owner names the helper, otherwise in a file."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.mesh.crypto.identity import Signer, SoftwareSigner
from sealring.mesh.errors import ConfigError
from sealring.mesh.member.state import IDENTITY_KEY
from sealring.mesh.system.files import read_bounded
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
