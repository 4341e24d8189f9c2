"""A carrier that does not seal, to measure what sealing costs. Nothing but `bench.ring` starts it.

It is the real carrier in every other way; the AEAD is replaced by a copy and a tag of zeros.
"""

from __future__ import annotations

from typing import Any

from cryptography.utils import Buffer

from sealring.mesh.crypto import TAG_BYTES, Suite
from sealring.node.carrier import main as carrier


class NoAead:
    """Copies. The interface is that of cryptography's AEADs as far as records use it."""

    def encrypt_into(self, nonce: bytes, data: Buffer, associated: Buffer | None, out: Buffer) -> int:
        with memoryview(data).cast("B") as plain, memoryview(out).cast("B") as sealed:
            sealed[: len(plain)] = plain
            sealed[len(plain) :] = bytes(TAG_BYTES)
            return len(plain) + TAG_BYTES

    def decrypt_into(self, nonce: bytes, data: Buffer, associated: Buffer | None, out: Buffer) -> int:
        with memoryview(data).cast("B") as sealed, memoryview(out).cast("B") as plain:
            plain[:] = sealed[: len(sealed) - TAG_BYTES]
            return len(plain)


def main() -> None:
    unsealed: Any = lambda suite, key: NoAead()  # noqa: E731
    Suite.aead = unsealed  # type: ignore[method-assign]
    carrier.main()


if __name__ == "__main__":
    main()
