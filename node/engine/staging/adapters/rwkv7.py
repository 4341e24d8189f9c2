"""RWKV 7: every layer mixes in the first layer's values, which travel with the state."""

from typing import Any

from ..layout import Arguments
from .base import Adapter, Followed


class Rwkv7(Adapter):
    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return arguments[0][0], arguments[0][1]


ADAPTER = Rwkv7(state=((0,), (1,)), batches=True)
