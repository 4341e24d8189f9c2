"""Paths of the HTTP edge: for each its handler, the scopes that may use it, and its description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from sealring.api.described import Operation
from sealring.edge.access.gate import ANY, LOOK, USE
from sealring.edge.access.keys import Scope

Edge = TypeVar("Edge")


@dataclass(frozen=True)
class Path(Generic[Edge]):
    """One path. `handler` takes the edge and the request.

    `scopes` are those of keys that may use it, None where no key is needed. `method` and `path` are as in
    OpenAPI: a parameter in braces matches the rest of the path.
    """

    method: str
    path: str
    handler: Callable[[Edge, Request], Awaitable[Response]]
    scopes: Collection[Scope] | None
    operation: Operation | None = None
    """The operation in openapi.json; None for a page for people, which it leaves out."""

    socket: Callable[[Edge, WebSocket], Awaitable[None]] | None = None
    """The handler of the same path over WebSocket, where it has one."""

    apart: bool = False
    """Whether it is answered beside all limits: it waits for nothing and holds nothing."""

    def routes(self, edge: Edge) -> Iterator[BaseRoute]:
        """The path with its handlers bound to `edge`."""

        async def endpoint(request: Request) -> Response:
            return await self.handler(edge, request)

        yield Route(self.path.replace("}", ":path}"), endpoint, methods=[self.method])
        if (handler := self.socket) is not None:
            yield WebSocketRoute(self.path, partial(handler, edge))


class Paths(Generic[Edge]):
    """All paths of an edge."""

    def __init__(self, paths: Iterable[Path[Edge]]) -> None:
        self._paths = tuple(paths)
        self._scopes = {one.path: one.scopes for one in self._paths if "{" not in one.path}
        self._apart = {one.path for one in self._paths if one.apart}
        self._open = [(one.path.partition("{")[0], one.scopes) for one in self._paths if "{" in one.path]

    def routes(self, edge: Edge) -> list[BaseRoute]:
        return [route for one in self._paths for route in one.routes(edge)]

    def apart(self, path: str) -> bool:
        """Whether the path is answered beside all limits."""
        return path in self._apart

    def has_socket(self, path: str) -> bool:
        """Whether the path is served over WebSocket."""
        return any(one.path == path and one.socket for one in self._paths)

    def scopes(self, path: str) -> Collection[Scope] | None:
        """The scopes that a path needs; None for no key. An unknown path needs a key of any scope."""
        for beginning, scopes in self._open:
            if path.startswith(beginning):
                return scopes
        return self._scopes.get(path, ANY)

    def operations(self) -> Sequence[tuple[str, str, Operation]]:
        """Method, path and description of the paths for programs."""
        return [(one.method, one.path, one.operation) for one in self._paths if one.operation is not None]

    def usable(self) -> list[str]:
        """Paths that use models or list them, for hints."""
        return [path for path, scopes in self._scopes.items() if scopes in (USE, LOOK)]
