"""The keys of a file as they are now: taken up whenever the file changes."""

from __future__ import annotations

import structlog

from sealring.edge.access.keyfile import KeyFile, KeyRecord
from sealring.mesh.errors import ConfigError

log = structlog.get_logger()


class KnownKeys:
    """Keys by their ids. Without a file (None, as in a process on the user's own machine) none is needed.

    With `always` every call needs a key, those included that are open to everybody elsewhere.
    """

    def __init__(self, file: KeyFile | None = None, *, always: bool = False) -> None:
        """Raises ConfigError (KEYS_CORRUPT, SECRET_FILE_UNSAFE) when there are keys that cannot be read, but
        with `always` none of them is good then."""
        self.file = file
        self.always = always
        self.records: dict[str, KeyRecord] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._required = always
        self._unreadable = False
        if always:
            self.refresh()
        else:
            self._read()

    @property
    def required(self) -> bool:
        """Whether a key is needed."""
        self.refresh()
        return self._required

    def usable(self, now: float) -> int:
        """How many keys would be let in at Unix time `now`."""
        self.refresh()
        return sum(record.usable(now) for record in self.records.values())

    def refresh(self) -> None:
        """Takes up a changed file. One that cannot be read leaves no key valid, and a key needed."""
        if self.file is None:
            return
        try:
            if self.file.stamp() != self._stamp:
                self._read()
            self._unreadable = False
        except (OSError, ConfigError) as error:
            self.records, self._required = {}, True
            if isinstance(error, OSError):  # the file may come back as it was
                self._stamp = None
            if not self._unreadable:
                log.error("api_keys_unreadable", error=error)
            self._unreadable = True

    def _read(self) -> None:
        if self.file is not None:
            # The stamp before the content: a change between the two is then read again, and not missed.
            self._stamp = self.file.stamp()
            # Never back to open: if the file disappears, no key is valid, rather than no key being needed.
            self._required = self._required or self._stamp is not None
            self.records = self.file.read()
            log.debug("api_keys_read", count=len(self.records))
