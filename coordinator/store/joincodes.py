"""The join code: one at a time, with the wrong tries that it has seen, which a restart does not forget."""

from __future__ import annotations

from dataclasses import dataclass, field

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.v1.store_pb2 import JoinCode

_FIELDS = [field.name for field in JoinCode.DESCRIPTOR.fields]


@dataclass(frozen=True)
class StoredJoinCode:
    """The fields of `JoinCode`, of which the code is shown in no trace; a message would show it."""

    code: str = field(repr=False)
    created: int
    expires: int
    uses: int
    wrong: int = 0
    wrong_at: int = 0


class StoredJoinCodes:
    """The join code, if there is one."""

    def __init__(self, database: Database) -> None:
        self._codes = Messages(database, "join code", JoinCode, lambda _: "")

    def find(self) -> StoredJoinCode | None:
        """The code, which may have expired. Raises ConfigError (STATE_CORRUPT)."""
        found = self._codes.find("")
        return StoredJoinCode(**{name: getattr(found, name) for name in _FIELDS}) if found else None

    def save(self, code: StoredJoinCode) -> None:
        """Store the code in place of the one before."""
        self._codes.save(JoinCode(**vars(code)))

    def clear(self) -> None:
        """Forget the code."""
        self._codes.clear()
