"""The Admin service: its table of RPCs, from the nouns that have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sealring.v1 import admin_pb2

_RPCS = set(admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name)


class AdminService:
    """Has the handler of each RPC as an attribute, as gRPC reads it. Each states the role that it `needs`."""

    def __init__(self, *nouns: object) -> None:
        """Raises TypeError unless each RPC has one handler, with a role."""
        found = [handler for noun in nouns for handler in _handlers(noun)]
        names = [handler.__name__ for handler in found]
        if sorted(names) != sorted(_RPCS):
            raise TypeError("each RPC of the Admin service has one handler with a role")
        self.__dict__.update(zip(names, found, strict=True))


def _handlers(noun: object) -> Iterator[Any]:
    for name in vars(type(noun)):
        handler = getattr(noun, name)
        if hasattr(handler, "needs"):
            yield handler
