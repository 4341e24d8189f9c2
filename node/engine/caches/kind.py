"""What may be done with the caches of one class of mlx-lm's."""

from __future__ import annotations

from typing import Any


class Kind:
    """A class of caches, each of one row.

    As it stands it is any class that nobody has named. Nothing that such a cache says of itself is believed.
    It is never cut, its rows are computed in turn, they have no drafts, and they are not stored on disk.
    """

    cuts = False
    """Whether a row can be cut to fewer tokens, however long it is."""
    merges = False
    """Whether rows can be computed together."""

    def knows(self, cache: Any) -> bool:
        """Whether this cache is used as those are that the kind was written for."""
        return True


UNKNOWN = Kind()
