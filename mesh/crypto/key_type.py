"""Kinds of identity keys, apart from the keys: a program that only names a level loads no cryptography."""

from __future__ import annotations

import enum


class KeyType(enum.StrEnum):
    """The place of a member's identity key: a file, or the Secure Enclave."""

    SOFTWARE = "software"
    SECURE_ENCLAVE = "secure_enclave"
