"""Bounds what gRPC for Python makes of the heads of calls, before it asks any code of ours.

Two things that one call of anybody did to a whole process, with grpcio 1.85:

* A path that is not UTF-8 shut the server down: the loop that takes calls decodes the path of a method that
  nobody registered, and ends with what it cannot decode. Here such calls do not get there.
* Until a connection acknowledges our settings gRPC holds it to HTTP/2's defaults: a head may have 16 MiB,
  half a million headers. A tuple was made of each, under the interpreter lock, and of each value that is not
  UTF-8 a record of the log as well: seconds in which the process did nothing else.

What is replaced are private parts of grpcio. `tests/mesh/rpc/test_heads.py` fails where a release has others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

MAX_HEADERS = 1024
"""Made in one task. Who keeps to our settings sends 120 in a head at most, of which tuples are made again
whenever a handler looks at them."""


class _BadHead(grpc.aio.AioRpcError):
    """Of a call that came in, or of an answer."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        said = f"more than {MAX_HEADERS} headers, or text that is not ASCII in one"
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, said)


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls of registered methods only, which all of ours are."""

    async def _request_call(self) -> None:
        """Of a method that is not registered: gRPC's loop waits for such a call for ever."""
        while True:
            await _end(await super()._request_call(), grpc.StatusCode.UNIMPLEMENTED, "no such method")


_handle_rpc = cygrpc._handle_rpc


async def _handle_bounded(*args: Any) -> None:
    """What gRPC does with a call, from the reading of its head on."""
    try:
        await _handle_rpc(*args)
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
    """From now on, for all servers and clients of this process that are of grpc.aio."""
    if cygrpc.AioServer is _AioServer:
        return
    cygrpc.AioServer = _AioServer
    cygrpc._handle_rpc = _handle_bounded
    cygrpc._Metadatum = _Metadatum(cygrpc._Metadatum)
    logging.getLogger(cygrpc.__name__).addFilter(_is_decodable)
