"""The offset between a member's clock and the coordinator's, from the times of a question and its reply."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offset:
    """Nanoseconds to add to a member's clock for the coordinator's: `value`, wrong by `error` at most."""

    value: int
    error: int

    @classmethod
    def of(cls, sent: int, asked: int, answered: int, received: int) -> Offset:
        """The offset by one round trip: two times of the coordinator's clock around two of the member's.

        RFC 5905, section 8. The error is half of the time that the messages travelled.
        """
        away = max(0, (received - sent) - (answered - asked))
        return cls(((sent - asked) + (received - answered)) // 2, (away + 1) // 2)

    def between(self, later: Offset) -> Offset:
        """The middle of two; the error covers both, and the drift from one to the other."""
        drift = abs(later.value - self.value)
        return Offset((self.value + later.value) // 2, max(self.error, later.error) + (drift + 1) // 2)
