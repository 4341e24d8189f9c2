"""Bounds on the headers of calls, which gRPC for Python decodes before it runs any code of ours.

With grpcio 1.85, one call by any stranger could harm a whole process in two ways:

* A path that is not UTF-8 stopped the server: the loop that accepts calls decodes the path of an unregistered
  method, and ends with an error. Here such calls do not reach it.
* Until a connection acknowledges our settings, gRPC allows it HTTP/2's defaults: 16 MiB, or half a million
  headers. gRPC made a tuple of each under the interpreter lock, and a log record of each value that
  is not UTF-8. The process did nothing else for seconds.

This module replaces private parts of grpcio. A server does not start if one of them is missing, and
`tests/mesh/rpc/test_heads.py` fails with a release that has them and does not use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from sealring.mesh.errors import ConfigError

PARTS = (
    "AioServer._request_call",
    "_handle_rpc",
    "_Metadatum",
    "RPCState",
    "execute_batch",
    "ExecuteBatchError",
    "SendInitialMetadataOperation",
    "SendStatusFromServerOperation",
)
"""Names in cygrpc: the parts that are replaced, and those that the replacements call."""

MAX_HEADERS = 1024
"""Tuples made in one task. A peer that keeps our settings sends at most 120 headers, and gRPC makes their
tuples again each time a handler reads them."""


class BadHead(grpc.aio.AioRpcError):
    """Bad headers of an incoming call, or of an answer to our own call."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        details = f"more than {MAX_HEADERS} headers, or text that is not ASCII in one"
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, details)


class _RegisteredOnly:
    """A base of gRPC's server that accepts calls of registered methods only. All of ours are registered."""

    async def _request_call(self) -> None:
        """Ends every call of an unregistered method, so that gRPC's loop waits for one for ever."""
        request: Any = super()
        while True:
            await _end(await request._request_call(), grpc.StatusCode.UNIMPLEMENTED, "no such method")


async def _handle_bounded(handle: Any, *args: Any) -> None:
    """Handles a call with gRPC's own `handle`, which reads the headers first; ends one with bad headers."""
    try:
        await handle(*args)
    except BadHead as error:
        call = next(one for one in args if isinstance(one, cygrpc.RPCState))
        await _end(call, grpc.StatusCode.INVALID_ARGUMENT, error.details() or "")


async def _end(call: Any, code: grpc.StatusCode, details: str) -> None:
    ending = (
        cygrpc.SendInitialMetadataOperation((), 0),
        cygrpc.SendStatusFromServerOperation((), code.value[0], details, 0),
    )
    with contextlib.suppress(cygrpc.ExecuteBatchError):  # the call has ended already
        await cygrpc.execute_batch(call, ending, asyncio.get_running_loop())


class CountedHeaders:
    """Makes one header's tuple of name and value, and counts the headers of each task."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self._task: asyncio.Task[Any] | None = None
        self._left = 0

    def __call__(self, name: str, value: str | bytes) -> Any:
        """Raises BadHead."""
        task = _current_task()
        if task is not self._task:
            self._task, self._left = task, MAX_HEADERS
        self._left -= 1
        if task is not None and (self._left < 0 or (isinstance(value, str) and not value.isascii())):
            raise BadHead
        return self.make(name, value)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # in a thread without an event loop
        return None


def is_decodable(record: logging.LogRecord) -> bool:
    """False for the record of a header that is not UTF-8: a stranger could fill the disk with these."""
    return not (record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError))


def bound_heads() -> None:
    """Bounds the headers of all grpc.aio servers and clients of this process from now on.

    Raises ConfigError (GRPC_UNKNOWN) and replaces nothing if this grpcio lacks one of the parts.
    """
    if isinstance(getattr(cygrpc, "_Metadatum", None), CountedHeaders):
        return
    missing = [part for part in PARTS if not _has(part)]
    if missing:
        raise ConfigError(
            f"grpcio {grpc.__version__} has no cygrpc.{missing[0]}, which is needed to bound calls' headers",
            hint="install sealring again, with the grpcio release that it requires",
            reason="GRPC_UNKNOWN",
        )
    cygrpc.AioServer = type("AioServer", (_RegisteredOnly, cygrpc.AioServer), {})
    cygrpc._handle_rpc = functools.partial(_handle_bounded, cygrpc._handle_rpc)
    cygrpc._Metadatum = CountedHeaders(cygrpc._Metadatum)
    logging.getLogger(cygrpc.__name__).addFilter(is_decodable)


def _has(part: str) -> bool:
    owner, _, name = part.rpartition(".")
    return hasattr(getattr(cygrpc, owner, None) if owner else cygrpc, name)
