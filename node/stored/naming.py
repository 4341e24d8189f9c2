"""The key by which a head names the prompts of a deployment: its own, or the key of the head before it.

By the latter's names it finds what was stored before. A key is chosen once for each ring before: what a head
has named since would be lost with another. A choice is kept in the model's folder, sealed under this member's
secret.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.system.files import write_atomic
from sealring.node.stored.keys import KEY_BYTES, expand, mac, model_folder

_NONCE_BYTES = 12
_FILE_BYTES = _NONCE_BYTES + 2 * KEY_BYTES + 16


class Naming:
    """The key of one deployment of a model. Blocks."""

    def __init__(self, root: Path, secret: bytes, cluster: str, deployment: str, model_digest: str) -> None:
        """`secret` is the model's (`model_secret`)."""
        facts = (each.encode() for each in (cluster, deployment, model_digest))
        self._own = expand(secret, pack_fields(b"sealring/v1 names of prompts", *facts))
        self._cipher = AESGCM(expand(self._own, b"sealring/v1 key of names that was taken"))
        self._file = model_folder(root, model_digest) / f"{mac(self._own, b'file').hex()[:16]}.names"

    def read(self) -> tuple[bytes, bytes]:
        """The key in use, 32 bytes, and the hash of the ring before for which it was chosen."""
        try:
            with self._file.open("rb") as file:
                data = file.read(_FILE_BYTES)
            both = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None)
        except (OSError, ValueError, InvalidTag):
            return self._own, b""
        return both[:KEY_BYTES], both[KEY_BYTES:]

    def choose(self, key: bytes, former: bytes) -> None:
        """Uses a key from now on. Raises OSError."""
        nonce = os.urandom(_NONCE_BYTES)
        write_atomic(self._file, nonce + self._cipher.encrypt(nonce, key + former, None))
