"""The keys under which prefixes on disk are sealed: each is derived from a secret of this member.

A model's folder holds a seed, a random point of P-256. The secret is what the identity key makes of it
(`SecretHolder.derive`), so a folder without the identity key is of no use, and neither is one without its
seed: removing that file destroys every block of the model. The daemon derives one key for each stage and
hands it to the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.identity import encode_public_key
from sealring.mesh.system.backups import leave_out
from sealring.mesh.system.files import create_exclusive, read_secret

FOLDER = "prefixes"
"""The folder of prefixes in the node's state folder."""

KEY_BYTES = 32
FORMAT = 1
"""Raised with every change of what a block holds, so that others are misses: the bytes of each layer's keys,
then of its values, [heads, tokens, width] each, as mlx-lm computes them. Quantized ones are words, scales and
biases. A snapshot has each window's last tokens, in order, and each state, of one layer behind the other."""

SEED, _NAMES = "seed", "names"


@runtime_checkable
class SecretHolder(Protocol):
    """A `Signer` that can also make secrets."""

    def derive(self, seed: bytes) -> bytes:
        """32 bytes that only this key makes of the seed, a P-256 point. Raises SealringError."""


@dataclass(frozen=True)
class StageIdentity:
    """What the caches of a stage depend on. Two stages that differ in any of it share no key.

    The caches of a layer come from all layers below it, so that a member's blocks are stale once another one
    computes in another way. `caches` says with what each rank computes: versions and weights (`Layout.digest`
    in node.engine.blocks). `releases` are the manifest hashes of the members where these differ: members that
    are alike change together.
    """

    cluster: str
    deployment: str
    model_digest: str
    layers: tuple[int, int]
    kv_bits: int
    releases: tuple[bytes, ...] = ()
    caches: tuple[bytes, ...] = ()

    def packed(self) -> bytes:
        """All of it, injectively."""
        numbers = (*self.layers, self.kv_bits, FORMAT, len(self.caches))
        return pack_fields(
            b"sealring/v1 prefixes of a stage",
            self.cluster.encode(),
            self.deployment.encode(),
            self.model_digest.encode(),
            *(number.to_bytes(8, "big") for number in numbers),
            *self.caches,
            *self.releases,
        )


def model_folder(root: Path, model_digest: str) -> Path:
    """The folder of a model's blocks and of their seed."""
    return root / hashlib.sha256(model_digest.encode()).hexdigest()[:16]


def stage_key(root: Path, stage: StageIdentity, model: str, holder: SecretHolder) -> bytes:
    """The key of a stage, 32 bytes; a model without a seed gets one. `model` is the model's name. Blocks.

    Raises OSError, ConfigError (SECRET_FILE_UNSAFE), and what `SecretHolder.derive` raises.
    """
    folder = model_folder(root, stage.model_digest)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    leave_out(root)
    file = folder / SEED
    if not file.exists():
        point = encode_public_key(ec.generate_private_key(ec.SECP256R1()).public_key())
        create_exclusive(file, point)
    if model not in names_of(folder):
        (folder / _NAMES).touch(mode=0o600)
        with (folder / _NAMES).open("a", encoding="utf-8") as names:
            names.write(f"{model}\n")
    return expand(model_secret(root, stage.model_digest, holder), stage.packed())


def model_secret(root: Path, model_digest: str, holder: SecretHolder) -> bytes:
    """What the keys of a model's stages come from, 32 bytes. Raises as `stage_key`, and FileNotFoundError for
    a model without a seed."""
    return holder.derive(read_secret(model_folder(root, model_digest) / SEED, max_bytes=128))


def expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand (RFC 5869) with SHA-256, 32 bytes; `key` is uniformly random already."""
    return HKDFExpand(SHA256(), KEY_BYTES, info).derive(key)


def mac(key: bytes, *fields: bytes) -> bytes:
    """HMAC-SHA256 over the fields, injectively."""
    return hmac.digest(key, pack_fields(*fields), "sha256")


def names_of(folder: Path) -> list[str]:
    """The names under which a model was served, as its folder has them. Raises OSError."""
    try:
        return (folder / _NAMES).read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def forget(root: Path, model: str | None = None) -> int:
    """Destroys the secret of one model, by its name, or of all, then removes their blocks; returns the number
    of these models. Raises OSError."""
    folders = [
        folder
        for folder in _folders(root)
        if model is None or any(_alike(model, name) for name in names_of(folder))
    ]
    for folder in folders:
        (folder / SEED).unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            gone = folder.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}"))
            shutil.rmtree(gone)  # engines that write or remove blocks meanwhile find another folder
    return len(folders)


def _alike(one: str, other: str) -> bool:
    """Whether two names may be of one model: a folder's path ends with its model's name."""
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def _folders(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
