#!/usr/bin/env python3
"""Speaks the Secure Enclave helper's frames with a key in memory, well or as badly as `--how` says.

Started as the real one: `STANDIN --key FILE`. FILE holds a PEM key and, in its first line, how to behave.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


def answer(request: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    if request == b"\x01":
        point = (serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
        return b"\x00" + key.public_key().public_bytes(*point)
    if request[:1] == b"\x03":
        return b"\x00" + hashlib.sha256(str(key.private_numbers().private_value).encode() + request).digest()
    if request[:1] != b"\x02" or len(request) < 2 or len(request) < 2 + request[1]:
        return b"\x01malformed request"
    label, content = request[2 : 2 + request[1]], request[2 + request[1] :]
    if not label.startswith(b"sealring/v1 "):
        return b"\x01unknown label"
    signed = b"\x20" * 64 + label + b"\x00" + hashlib.sha256(content).digest()
    return b"\x00" + key.sign(signed, ec.ECDSA(hashes.SHA256()))


def main() -> None:
    file = Path(sys.argv[sys.argv.index("--key") + 1])
    how, _, pem = file.read_bytes().partition(b"\n")
    if how.startswith(b"refuses: "):
        sys.exit(how.decode())
    key = serialization.load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    while True:
        request = read_exactly(int.from_bytes(read_exactly(4), "big"))
        said = answer(request, key)
        behave(how.decode() if request[:1] == b"\x02" or how.startswith(b"always ") else "well", said, key)


def behave(how: str, said: bytes, key: ec.EllipticCurvePrivateKey) -> None:
    how = how.removeprefix("always ")
    framed = len(said).to_bytes(4, "big") + said
    if how == "hang":
        time.sleep(60)
    elif how == "end":
        sys.exit(0)
    elif how == "truncated":
        os.write(1, framed[:-1])
        sys.exit(0)
    elif how == "half":
        os.write(1, framed[:-1])
        time.sleep(60)
    elif how == "oversized":
        os.write(1, (1 << 30).to_bytes(4, "big") + said)
    elif how == "empty":
        os.write(1, bytes(4))
    elif how == "error":
        os.write(1, b"\x00\x00\x00\x05\x01busy")
    elif how.startswith("says "):  # the number of bytes in all
        count = int(how.removeprefix("says "))
        os.write(1, count.to_bytes(4, "big") + b"\x01" + b"x" * (count - 1))
    elif how == "unreadable":
        os.write(1, b"\x00\x00\x00\x04\x01\xff\x00\n")
    elif how == "garbage":
        os.write(1, b"\x00\x00\x00\x03\x00ab")
    elif how == "other key":
        other = ec.generate_private_key(ec.SECP256R1())
        signature = b"\x00" + other.sign(b"anything", ec.ECDSA(hashes.SHA256()))
        os.write(1, len(signature).to_bytes(4, "big") + signature)
    else:
        os.write(1, framed)


if __name__ == "__main__":
    main()
