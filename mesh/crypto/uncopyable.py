"""Objects with one owner: copying or pickling one would give a key two users."""

from __future__ import annotations

from typing import NoReturn

from sealring.mesh.errors import RecordError


class Uncopyable:
    """Refuses `copy`, `deepcopy` and `pickle` with RecordError (KEY_COPIED)."""

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise _refusal(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _refusal(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _refusal(self)


def _refusal(thing: object) -> RecordError:
    return RecordError(f"{type(thing).__name__} cannot be copied", reason="KEY_COPIED")
