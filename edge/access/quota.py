"""Tokens a day: what a key may use, and when its day begins anew."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta

from sealring.mesh.errors import ResourceExhausted

Spent = Callable[[str], int]
"""Tokens that a key, given by its id, has used today."""

QUOTA_USED = "DAILY_TOKENS_USED"


def day_of(now: float) -> date:
    """The day of Unix time `now` in this machine's time zone."""
    return datetime.fromtimestamp(now).date()


def day_ends(now: float) -> datetime:
    """The midnight that follows `now`, in this machine's time zone."""
    tomorrow = day_of(now) + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day).astimezone()


def check_quota(tokens_a_day: int, spent: int, now: float) -> None:
    """Raises ResourceExhausted (DAILY_TOKENS_USED) once a day's tokens are used; 0 means any number."""
    if not tokens_a_day or spent < tokens_a_day:
        return
    anew = day_ends(now)
    raise ResourceExhausted(
        f"this API key has used its {tokens_a_day:,} tokens of today",
        hint=f"it has as many again from {anew:%Y-%m-%d %H:%M %Z} on; the gateway's owner sets how many: "
        "sealring key limit",
        reason=QUOTA_USED,
        retry_after=max(1, round(anew.timestamp() - now)),
        limit=tokens_a_day,
    )
