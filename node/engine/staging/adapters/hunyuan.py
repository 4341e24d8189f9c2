"""Hunyuan: a layer hands the step's keys and values to the layers that have no projections of their own."""

from typing import Any

from ..layout import Arguments
from .base import Adapter, Followed


class Hunyuan(Adapter):
    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return arguments[0][0], arguments[0][3]


ADAPTER = Hunyuan(state=((0,), (3, 0), (3, 1)), batches=True)
