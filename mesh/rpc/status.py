"""The exception tree as gRPC status and back: google.rpc.Status with one ErrorInfo (google.aip.dev/193)."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from sealring.mesh.errors import DOMAIN, Cancelled, DeadlineExceeded, Internal, SealringError, Unavailable
from sealring.mesh.rpc.problem import MAX_MESSAGE, bounded, from_parts


def to_status(error: SealringError) -> status_pb2.Status:
    """A rich status: the message with its hint, and ErrorInfo with the stable reason and the hint."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    info.metadata.update(bounded(error.metadata))
    if error.hint:
        info.metadata["hint"] = error.hint[:MAX_MESSAGE]
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code), message=str(error)[:MAX_MESSAGE], details=[detail]
    )


def from_rpc_error(error: grpc.RpcError) -> SealringError:
    """The error of the tree for a failed call, with the server's own reason and hint."""
    code, details = error.code().name, error.details() or ""
    info = _error_info(error)
    if info is not None:
        metadata = dict(info.metadata)
        hint = metadata.pop("hint", "")
        message = details.removesuffix(f" (hint: {hint})") if hint else details
        return from_parts(code, info.reason, message, hint, metadata)
    if code == "UNAVAILABLE":
        return Unavailable("the server cannot be reached", hint="check its address and that it runs")
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded("the call took longer than its deadline", hint="try again or allow more time")
    if code == "CANCELLED":
        return Cancelled("the call was cancelled")
    if code == "UNIMPLEMENTED":
        return Internal(
            "the server does not know this call", hint="run the same release everywhere", reason=code
        )
    return from_parts(code, code, details or "the call failed", "")


def is_servers(error: grpc.RpcError) -> bool:
    """Whether the server itself ended the call, by `to_status`: a connection that broke gives no details."""
    return _error_info(error) is not None


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            info = error_details_pb2.ErrorInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                return info
    except (ValueError, DecodeError):
        return None
    return None
