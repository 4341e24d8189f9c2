"""The join code: one at a time, with the wrong tries that it has seen, which a restart does not forget."""

from __future__ import annotations

from dataclasses import dataclass, field

from sealring.coordinator.store.database import Database
from sealring.mesh.crypto.encoding import Fields, FormatError, canonical_json, field_names, parse_json_object

_CODE = "join_code"
_MAX_BYTES = 4096


@dataclass(frozen=True)
class StoredJoinCode:
    """A code, the nodes that it still lets join, and the wrong codes that were tried in its time. Times are
    seconds since 1970."""

    code: str = field(repr=False)
    created: int
    expires: int
    uses: int
    wrong: int = 0
    wrong_at: int = 0


class StoredJoinCodes:
    """The join code, if there is one.

    It is stored as it is, because both ends of an exchange need it; a hash of seven digits would hide
    nothing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self) -> StoredJoinCode | None:
        """The code, which may have expired. Raises ConfigError (STATE_CORRUPT)."""
        row = self._database.row("SELECT value FROM meta WHERE name = ?", _CODE)
        if row is None:
            return None
        names = field_names(StoredJoinCode)
        try:
            fields = Fields(parse_json_object(bytes(row["value"]), max_bytes=_MAX_BYTES), names)
            return StoredJoinCode(fields.text("code"), *map(fields.integer, names[1:]))
        except FormatError:
            raise self._database.corrupt("meta", "the join code") from None

    def save(self, code: StoredJoinCode) -> None:
        """Store the code in place of the one before."""
        with self._database.transaction() as connection:
            connection.execute("REPLACE INTO meta VALUES (?, ?)", (_CODE, canonical_json(vars(code))))

    def clear(self) -> None:
        """Forget the code."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM meta WHERE name = ?", (_CODE,))
