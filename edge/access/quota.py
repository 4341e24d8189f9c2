"""Tokens a day: what a key may use, and when its day begins anew."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import ResourceExhausted

QUOTA_USED = "DAILY_TOKENS_USED"
CUT_OFF_SECONDS = 900
"""How long the rest of an answer that a fault has cut off is not refused."""

_MOST_CUT_OFF = 256


def day_of(now: float) -> date:
    """The day of Unix time `now` in this machine's time zone."""
    return datetime.fromtimestamp(now).date()


def day_ends(now: float) -> datetime:
    """The midnight that follows `now`, in this machine's time zone."""
    tomorrow = day_of(now) + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day).astimezone()


@dataclass(slots=True)
class Claim:
    """A request that counts. When it ends, `rests` of its answers may be asked for from where they were cut
    off, whatever is left of the quota."""

    rests: int = 0


class Quotas:
    """What keys may still use today. Requests under way count with the most that each may use, so a key
    passes its quota by the last request that was let in alone."""

    def __init__(
        self,
        quota: Callable[[str], int],
        spent: Callable[[str], int],
        on_refused: Callable[[str], None] = lambda reason: None,
        clock: Clock = wall_clock,
    ) -> None:
        """`quota` gives the tokens a day of a key, by its id, and 0 for any number; `spent` those that it has
        used today. `clock` tells Unix time."""
        self._quota = quota
        self._spent = spent
        self._on_refused = on_refused
        self._clock = clock
        self.claimed = Counter[str]()
        """The tokens that the requests under way of each key may use at most."""
        self._cut_off: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=_MOST_CUT_OFF))

    @contextmanager
    def claim(self, key_id: str, tokens: Callable[[], int], *, goes_on: bool = False) -> Iterator[Claim]:
        """Counts the block as a request of at most `tokens()` tokens, which may be many for nothing. One that
        `goes_on`, by its client's word, is not refused where it may be the rest of an earlier one.

        Raises ResourceExhausted: DAILY_TOKENS_USED, or TOO_MANY_AT_ONCE while what is left may be used by
        requests under way.
        """
        quota = self._quota(key_id)
        if not quota:
            yield Claim()
            return
        rests, left = self._cut_off[key_id], quota - self._spent(key_id)
        claim = Claim(int(goes_on and bool(rests) and rests.popleft() > self._clock()))
        if not claim.rests and left <= self.claimed[key_id]:
            error = self._used_up(quota) if left <= 0 else _all_claimed(quota)
            self._on_refused(error.reason)
            raise error
        most = tokens()
        self.claimed[key_id] += most
        try:
            yield claim
        finally:
            rests.extend([self._clock() + CUT_OFF_SECONDS] * claim.rests)
            self.claimed[key_id] -= most
            if not self.claimed[key_id]:
                del self.claimed[key_id]

    def _used_up(self, quota: int) -> ResourceExhausted:
        now = self._clock()
        anew = day_ends(now)
        return ResourceExhausted(
            f"this API key has used its {quota:,} tokens of today",
            hint=f"it has as many again from {anew:%Y-%m-%d %H:%M %Z} on; the gateway's owner sets how many: "
            "sealring key limit",
            reason=QUOTA_USED,
            retry_after=max(1, round(anew.timestamp() - now)),
            limit=quota,
        )


def _all_claimed(quota: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"the key's requests under way may use what is left of its {quota:,} tokens of today",
        hint="wait until some have ended; a lower max_tokens leaves more to others",
        reason="TOO_MANY_AT_ONCE",
        retry_after=1,
        limit=quota,
    )
