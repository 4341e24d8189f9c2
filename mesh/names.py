"""Names of machines, clusters and deployments, and ids of rings and commits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from sealring.mesh.crypto.encoding import encode_base32
from sealring.mesh.errors import FailedPrecondition, InvalidInput

MAX_DEPLOYMENT_NAME = 128

_DEPLOYMENT = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_DEPLOYMENT_NAME}}}\Z")
_ALIAS = re.compile(rf"(?=.{{1,{MAX_DEPLOYMENT_NAME}}}\Z)[A-Za-z0-9._/:-]+\*?\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,54}[a-z0-9])?\Z")
_PROVIDER = "openai/"
_MAKERS = re.compile(r"claude-|codex-|gpt-\d")
"""How names begin that Claude Code and Codex know by themselves, and that only their makers serve."""

_SLUG_CHARACTERS = 40
_HASH_CHARACTERS = 12


def is_label(text: str) -> bool:
    """Whether `text` is a DNS label in lower case."""
    return _LABEL.match(text) is not None


def is_commit(text: str) -> bool:
    """Whether `text` is the SHA-1 of a git object in hex, by which the Hugging Face hub names commits."""
    return _COMMIT.match(text) is not None


def is_sha256(text: str) -> bool:
    """Whether `text` is a SHA-256 in hex."""
    return _SHA256.match(text) is not None


def own_name(name: str, names: Sequence[str]) -> str | None:
    """The deployment out of `names` that has this name; clients of several APIs put "openai/" before it."""
    return next((each for each in (name, name.removeprefix(_PROVIDER)) if each in names), None)


def served_name(name: str, names: Sequence[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """The deployment out of `names` that a client means; None for an unknown one.

    A deployment's own name counts before `aliases`. Of these, whole names count before those that end in `*`,
    which stand for every name that begins so, and a longer one before a shorter. An empty name means the only
    deployment, and so does a name that programs ask for by themselves, in the background.
    """
    known = {alias: one for alias, one in (aliases or {}).items() if one in names}
    plain = name.removeprefix(_PROVIDER)
    for each in (name, plain):
        if each in names:
            return each
        if each in known:
            return known[each]
    begun = [alias for alias in known if alias.endswith("*") and plain.startswith(alias[:-1])]
    if begun:
        return known[max(begun, key=len)]
    only = len(names) == 1 and (not name or _MAKERS.match(plain))
    return names[0] if only else None


def split_pin(name: str) -> tuple[str, str]:
    """A model's name, and the digest that its client demands behind it; "" if it demands none.

    The digest is 64 hexadecimal digits behind an @. Raises InvalidInput (BAD_DIGEST).
    """
    plain, pinned, digest = name.partition("@")
    if pinned and not is_sha256(digest):
        raise InvalidInput(
            "the part behind @ in the model's name is no digest",
            hint="give the 64 hexadecimal digits of the model's digest in lower case, or the name alone",
            reason="BAD_DIGEST",
            param="model",
        )
    return plain, digest


def model_differs(name: str) -> FailedPrecondition:
    """The refusal of a model whose digest is not the one that the client demands."""
    return FailedPrecondition(
        f"{name} has another digest than the one that is demanded",
        hint="ask the operator which weights it has: sealring deployment list --json (plan.profile.digest)",
        reason="MODEL_DIFFERS",
        param="model",
    )


def check_name(name: str, what: str) -> str:
    """`name` if it is a DNS label. Raises InvalidInput (BAD_NAME)."""
    if not is_label(name):
        raise InvalidInput(
            f"{what} name is not 1 to 63 of a-z, 0-9 and inner hyphens", reason="BAD_NAME", param=what
        )
    return name


def check_deployment_name(name: str) -> str:
    """`name` if it is valid for a deployment. Raises InvalidInput (BAD_NAME)."""
    if _DEPLOYMENT.match(name) is None:
        raise InvalidInput(
            f"deployment name is not 1 to {MAX_DEPLOYMENT_NAME}"
            " of A-Z, a-z, 0-9, dot, underscore, slash and hyphen",
            reason="BAD_NAME",
            param="name",
        )
    return name


def is_alias(text: str) -> bool:
    """Whether `text` may be a further name of a deployment (`qwen3:8b`), or their beginning (`gpt-5*`)."""
    return _ALIAS.match(text) is not None


def ring_id(deployment: str, replica: int) -> str:
    """The id of a replica's ring, a DNS label: `demo-0` for demo, `qwen2-5-<hash>-0` for Qwen2.5.

    A name that is no label itself gets a part of its SHA-256 (60 bits), so that no two names share a ring.
    """
    if _PLAIN.match(deployment) is not None:
        return f"{deployment}-{replica}"
    slug = re.sub(r"[^a-z0-9]+", "-", deployment.lower()).strip("-")[:_SLUG_CHARACTERS].strip("-")
    digest = encode_base32(hashlib.sha256(deployment.encode()).digest())[:_HASH_CHARACTERS]
    return f"{slug or 'ring'}-{digest}-{replica}"
