"""The gateway's API keys on disk: one JSON file of mode 0600, replaced as a whole, changed under a lock.

Revoked keys stay in it, marked, so that the revocation of the last one never opens the gateway.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sealring.edge.access.keys import Scope, hash_key, is_hash, new_key
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import ConfigError, InvalidInput, NotFound, ResourceExhausted
from sealring.mesh.system.files import read_secret, write_atomic

KEYS_FILE = "keys.json"
LOCK_FILE = "keys.lock"
LAN_FOLDER = "lan"
"""The folder in a gateway's state with the keys and certificates of its LAN door."""

MAX_KEYS = 1000
MAX_LABEL = 64
USE_SECONDS = 3600
"""How coarse the time of last use is: what is on disk does not tell when somebody asked something."""

_MAX_BYTES = 1 << 20


def _check_hash(text: str) -> str:
    if not is_hash(text):
        raise ValueError("not a hash of a key")
    return text


class KeyRecord(BaseModel):
    """What is kept of one key. Times are in Unix seconds; 0 means never."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    id: Annotated[str, Field(pattern=r"^[a-z2-7]{16}$")]
    hash: Annotated[str, AfterValidator(_check_hash)] = Field(repr=False)
    label: Annotated[str, Field(max_length=MAX_LABEL)] = ""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]
    created: Annotated[int, Field(ge=0)]
    expires: Annotated[int, Field(ge=0)] = 0
    last_used: Annotated[int, Field(ge=0)] = 0
    revoked: Annotated[int, Field(ge=0)] = 0
    tokens_a_day: Annotated[int, Field(ge=0)] = 0
    """A quota of tokens; 0 means any number."""

    def usable(self, now: float) -> bool:
        """Whether the key is neither revoked nor expired."""
        return not self.revoked and (not self.expires or now < self.expires)

    def allows(self, scopes: Iterable[Scope]) -> bool:
        """Whether the key has one of the scopes, or all of them as an admin."""
        return Scope.ADMIN in self.scopes or any(scope in self.scopes for scope in scopes)


class Content(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    version: Literal[1] = 1
    keys: Annotated[list[KeyRecord], Field(max_length=MAX_KEYS)]


class KeyFile:
    """The keys in one gateway's state folder. Several processes may use it at once."""

    def __init__(self, folder: Path, *, clock: Clock = wall_clock) -> None:
        self.file = folder / KEYS_FILE
        self._lock = folder / LOCK_FILE
        self._clock = clock

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does; None while there is none."""
        try:
            status = os.stat(self.file, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def read(self) -> dict[str, KeyRecord]:
        """All keys by id, none when there is no file.

        Raises ConfigError (KEYS_CORRUPT, SECRET_FILE_UNSAFE).
        """
        try:
            data = read_secret(self.file, max_bytes=_MAX_BYTES)
        except FileNotFoundError:
            return {}
        try:
            records = Content.model_validate_json(data).keys
        except ValidationError:
            raise self._corrupt() from None
        keys = {record.id: record for record in records}
        if len(keys) != len(records):
            raise self._corrupt()
        return keys

    def create(
        self, scopes: Iterable[Scope], *, label: str = "", seconds: int = 0, tokens_a_day: int = 0
    ) -> tuple[str, KeyRecord]:
        """Makes a key, good for `seconds` (0: until it is revoked); its text is given this once.

        Raises InvalidInput (BAD_LABEL, NO_SCOPE), ResourceExhausted (TOO_MANY_KEYS).
        """
        if len(label) > MAX_LABEL or not label.isprintable():
            raise InvalidInput(
                "the label is not printable or too long",
                hint=f"use at most {MAX_LABEL} characters",
                reason="BAD_LABEL",
            )
        chosen = tuple(sorted(set(scopes)))
        if not chosen:
            raise InvalidInput("the key has no scope", hint="name one or more", reason="NO_SCOPE")
        key, now = new_key(), int(self._clock())
        record = KeyRecord(
            id=key.id,
            hash=hash_key(key),
            label=label,
            scopes=chosen,
            created=now,
            expires=now + seconds if seconds else 0,
            tokens_a_day=tokens_a_day,
        )
        with self._changing() as keys:
            _make_room(keys)
            keys[record.id] = record
        return key.text, record

    def revoke(self, key_id: str) -> KeyRecord:
        """Revokes a key for good. Raises NotFound (NO_SUCH_KEY)."""
        with self._changing() as keys:
            record = _known(keys, key_id)
            if not record.revoked:
                keys[key_id] = record.model_copy(update={"revoked": int(self._clock())})
            return keys[key_id]

    def limit(self, key_id: str, tokens_a_day: int) -> KeyRecord:
        """Sets how many tokens a day a key may use, 0 for any number. Raises NotFound (NO_SUCH_KEY)."""
        with self._changing() as keys:
            changed = _known(keys, key_id).model_copy(update={"tokens_a_day": tokens_a_day})
            keys[key_id] = changed
            return changed

    def note_use(self, used: Mapping[str, int]) -> None:
        """Writes down when keys were last used, given by id."""
        with self._changing() as keys:
            for key_id, moment in used.items():
                record, moment = keys.get(key_id), moment // USE_SECONDS * USE_SECONDS
                if record is not None:
                    keys[key_id] = record.model_copy(update={"last_used": max(moment, record.last_used)})

    @contextmanager
    def _changing(self) -> Iterator[dict[str, KeyRecord]]:
        self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = self.read()
            keys = dict(before)
            yield keys
            if keys != before:
                content = Content(keys=list(keys.values()))
                write_atomic(self.file, content.model_dump_json(indent=1, exclude_defaults=True).encode())
        finally:
            os.close(descriptor)

    def _corrupt(self) -> ConfigError:
        return ConfigError(
            f"{self.file} is not a file of API keys as this release writes them",
            hint="restore it from a backup, or remove it and create new keys",
            reason="KEYS_CORRUPT",
        )


def _known(keys: Mapping[str, KeyRecord], key_id: str) -> KeyRecord:
    if key_id not in keys:
        hint = "see: sealring key list; keys of the LAN door have a list of their own: --lan"
        raise NotFound(f"there is no key {key_id[:32]!r}", hint=hint, reason="NO_SUCH_KEY")
    return keys[key_id]


def _make_room(keys: dict[str, KeyRecord]) -> None:
    """Forgets the key that was revoked first when the file is full of them."""
    if len(keys) < MAX_KEYS:
        return
    revoked = [record for record in keys.values() if record.revoked]
    if not revoked:
        raise ResourceExhausted(
            f"there are {MAX_KEYS} keys already", hint="revoke some", reason="TOO_MANY_KEYS", limit=MAX_KEYS
        )
    del keys[min(revoked, key=lambda record: record.revoked).id]
