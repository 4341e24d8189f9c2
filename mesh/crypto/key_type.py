"""Where identity keys are kept. Apart from the keys, so that who only names a level loads no cryptography."""

from __future__ import annotations

import enum


class KeyType(enum.StrEnum):
    """Where a member keeps its identity key."""

    SOFTWARE = "software"
    SECURE_ENCLAVE = "secure_enclave"
