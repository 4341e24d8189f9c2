"""Fetches one model from the Hugging Face hub: a process of its own, started by the daemon.

`python -m sealring.node.models.fetch ORG/NAME --into FOLDER --control-fd N`. Exit status 0 when all of it is
in the folder, checked against the hub's hashes; what an earlier process has fetched is kept. HubEvents go out
on N. The end of the control socket, and so of the daemon, ends it. Python files are never fetched: no code
comes with a model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from sealring.mesh.errors import ModelError, SealringError, Unavailable
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.system import logging
from sealring.mesh.system.coredumps import forbid_core_files
from sealring.node.ipc.frames import FrameSocket
from sealring.node.models.folders import not_found
from sealring.node.models.landing import check_disk
from sealring.node.models.manifest import MAX_BYTES, MAX_FILES, belongs
from sealring.v1 import engine_pb2

log = structlog.get_logger()


def main() -> None:
    """Fetches the model that the command line names."""
    forbid_core_files()
    parser = argparse.ArgumentParser(
        prog="python -m sealring.node.models.fetch", description="started by the node daemon"
    )
    parser.add_argument("model")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.configure("fetch")
    control = socket.socket(fileno=arguments.control_fd)
    frames = FrameSocket(control)
    threading.Thread(target=_die_with_daemon, args=(control,), daemon=True).start()
    try:
        fetch(arguments.model, arguments.into, frames)
    except SealringError as error:
        log.error("model_not_fetched", reason=error.reason, why=error.message)
        frames.send(engine_pb2.HubEvent(problem=to_problem(error)))
        sys.exit(1)


def fetch(model: str, into: Path, frames: FrameSocket) -> None:
    """Raises NotFound (MODEL_NOT_FOUND), Unavailable (HUB_OFFLINE, HUB_UNREACHABLE), ResourceExhausted
    (DISK_FULL), ModelError (MODEL_TOO_LARGE, MODEL_PART_DAMAGED)."""
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(model, files_metadata=True)
        files = [file for file in info.siblings or () if belongs(file.rfilename)]
        if all(file.rfilename != "config.json" for file in files):
            raise not_found(model, "the repository holds no model")
        size = sum(file.size or 0 for file in files)
        if len(files) > MAX_FILES or size > MAX_BYTES:
            raise ModelError(
                f"the repository of {model} holds {len(files)} files of a model, {size >> 30} GiB",
                hint=f"at most {MAX_FILES} and {MAX_BYTES >> 30} GiB can be passed on to other nodes",
                reason="MODEL_TOO_LARGE",
            )
        frames.send(engine_pb2.HubEvent(size=size))
        check_disk(into, size - sum(_written(path) for path in into.rglob("*") if path.is_file()))
        for file in files:
            if file.lfs is None:
                huggingface_hub.hf_hub_download(model, file.rfilename, revision=info.sha, local_dir=into)
            else:
                _fetch_large(model, str(info.sha), file.rfilename, file.lfs.sha256, into)
    except SealringError:
        raise
    except Exception as error:
        raise _refusal(error, model) from error


def _fetch_large(model: str, revision: str, name: str, digest: str, into: Path) -> None:
    """One file of weights, from where an earlier process has left it: huggingface_hub begins anew."""
    import huggingface_hub
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    path, partial = into / name, into / ".hub" / digest
    if path.is_file() and _digest(path) == digest:
        return
    url = huggingface_hub.hf_hub_url(model, name, revision=revision)
    found = huggingface_hub.get_hf_file_metadata(url)
    headers = build_hf_headers()
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the storage's address is signed
    partial.parent.mkdir(exist_ok=True)
    partial.touch()
    with partial.open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        http_get(
            found.location,
            stream,
            resume_size=stream.tell(),
            headers=headers,
            expected_size=found.size,
            tqdm_class=None,
        )
    if _digest(partial) != digest:
        partial.unlink()
        raise ModelError(f"{name} is not what the hub says", hint="try again", reason="MODEL_PART_DAMAGED")
    partial.replace(path)


def _written(path: Path) -> int:
    """Bytes of a file that need no more room: what a member has begun has holes, POSIX blocks are of 512."""
    status = path.stat()
    return min(status.st_size, status.st_blocks * 512)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _refusal(error: BaseException, model: str) -> SealringError:
    """What an error of huggingface_hub comes from: it wraps the first one in others."""
    from huggingface_hub import errors

    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
        return Unavailable("HF_HUB_OFFLINE keeps the hub away", hint="unset it", reason="HUB_OFFLINE")
    if any(isinstance(one, errors.RepositoryNotFoundError) for one in chain):
        return not_found(model, "check the id; a gated or private model needs HF_TOKEN")
    log.error("hub_error", exc_info=error)
    return Unavailable(
        f"the hub does not give the model: {type(chain[-1]).__name__}",
        hint="check the network, and try again: what has come is kept",
        reason="HUB_UNREACHABLE",
    )


def _die_with_daemon(control: socket.socket) -> None:
    control.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
