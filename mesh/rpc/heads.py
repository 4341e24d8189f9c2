"""Bounds what gRPC for Python makes of the heads of calls, before it asks any code of ours.

Two things that one call of anybody did to a whole process, with grpcio 1.85:

* A path that is not UTF-8 shut the server down: the loop that takes calls decodes the path of a method that
  nobody registered, and ends with what it cannot decode. Here such calls do not get there.
* Until a connection acknowledges our settings gRPC holds it to HTTP/2's defaults: a head may have 16 MiB,
  half a million headers. A tuple was made of each, under the interpreter lock, and of each value that is not
  UTF-8 a record of the log as well: seconds in which the process did nothing else.

What is replaced are private parts of grpcio. A server does not start where one of them is missing, and
`tests/mesh/rpc/test_heads.py` fails where a release has them and does not use them.
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

_PARTS = (
    "AioServer._request_call",
    "_handle_rpc",
    "_Metadatum",
    "RPCState",
    "execute_batch",
    "ExecuteBatchError",
    "SendInitialMetadataOperation",
    "SendStatusFromServerOperation",
)
"""Of cygrpc: what is replaced, and what the replacements call."""

MAX_HEADERS = 1024
"""Made in one task. Who keeps to our settings sends 120 in a head at most, of which tuples are made again
whenever a handler looks at them."""


class _BadHead(grpc.aio.AioRpcError):
    """Of a call that came in, or of an answer."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        said = f"more than {MAX_HEADERS} headers, or text that is not ASCII in one"
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, said)


class _RegisteredOnly:
    """A base of gRPC's server that takes calls of registered methods only, which all of ours are."""

    async def _request_call(self) -> None:
        """Of a method that is not registered: gRPC's loop waits for such a call for ever."""
        request: Any = super()
        while True:
            await _end(await request._request_call(), grpc.StatusCode.UNIMPLEMENTED, "no such method")


async def _handle_bounded(handle: Any, *args: Any) -> None:
    """What gRPC does with a call, from the reading of its head on, by `handle`."""
    try:
        await handle(*args)
    except _BadHead as error:
        call = next(one for one in args if isinstance(one, cygrpc.RPCState))
        await _end(call, grpc.StatusCode.INVALID_ARGUMENT, error.details() or "")


async def _end(call: Any, code: grpc.StatusCode, said: str) -> None:
    ending = (
        cygrpc.SendInitialMetadataOperation((), 0),
        cygrpc.SendStatusFromServerOperation((), code.value[0], said, 0),
    )
    with contextlib.suppress(cygrpc.ExecuteBatchError):  # it has ended
        await cygrpc.execute_batch(call, ending, asyncio.get_running_loop())


class _Metadatum:
    """Makes one header's tuple of name and value."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._task: asyncio.Task[Any] | None = None
        self._left = 0

    def __call__(self, name: str, value: str | bytes) -> Any:
        """Raises _BadHead."""
        task = _current_task()
        if task is not self._task:
            self._task, self._left = task, MAX_HEADERS
        self._left -= 1
        if task is not None and (self._left < 0 or (isinstance(value, str) and not value.isascii())):
            raise _BadHead
        return self._make(name, value)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread of its own, without an event loop
        return None


def _is_decodable(record: logging.LogRecord) -> bool:
    """False for the record of a header that is not UTF-8, with which anybody could fill the disk."""
    return not (record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError))


def bound_heads() -> None:
    """From now on, for all servers and clients of this process that are of grpc.aio.

    Raises ConfigError (GRPC_UNKNOWN) where this grpcio lacks one of the parts; nothing is replaced then.
    """
    if isinstance(getattr(cygrpc, "_Metadatum", None), _Metadatum):
        return
    missing = [part for part in _PARTS if not _has(part)]
    if missing:
        raise ConfigError(
            f"grpcio {grpc.__version__} has no cygrpc.{missing[0]}, which bounds what strangers may send",
            hint="install sealring anew, with the grpcio that it asks for",
            reason="GRPC_UNKNOWN",
        )
    cygrpc.AioServer = type("AioServer", (_RegisteredOnly, cygrpc.AioServer), {})
    cygrpc._handle_rpc = functools.partial(_handle_bounded, cygrpc._handle_rpc)
    cygrpc._Metadatum = _Metadatum(cygrpc._Metadatum)
    logging.getLogger(cygrpc.__name__).addFilter(_is_decodable)


def _has(part: str) -> bool:
    owner, _, name = part.rpartition(".")
    return hasattr(getattr(cygrpc, owner, None) if owner else cygrpc, name)
