"""Fetches a model from the Hugging Face hub, or a part: a process of its own, started by the daemon.

`python -m sealring.node.models.fetch ORG/NAME --home FOLDER --control-fd N` fills a `PartialModel`.
With `--part` it fetches only the headers of weights and the ranges in the file `.wanted` there. Parts of an
earlier process stay, and so does their commit. Each complete file is checked against the hub's hash. The
process sends HubEvents on N and ends with the control socket, and so with the daemon. Python files are never
fetched: no code comes with a model.
"""

from __future__ import annotations

from sealring.mesh.system.start import collect_seldom, hide_rich

if __name__ == "__main__":
    hide_rich()  # before structlog
    collect_seldom()

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from sealring.mesh.errors import ModelError, SealringError, Unavailable
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.system import logging
from sealring.mesh.system.start import forbid_core_files
from sealring.node.models.folders import not_found
from sealring.node.models.hub import Repository, damaged
from sealring.node.models.kept import (
    beginnings,
    check_commit,
    commit_of,
    every_part,
    headers,
    note_of,
    runs,
    with_ranges,
)
from sealring.node.models.manifest import PART, Manifest
from sealring.node.models.partial_model import PartialModel
from sealring.node.wire.frames import FrameSocket
from sealring.v1 import engine_pb2

log = structlog.get_logger()

WANTED = ".wanted"
"""File in the partial folder with the wanted bytes [first, end) of files, as JSON."""

Send = Callable[[engine_pb2.HubEvent], None]

_WHY = {
    "gaierror": "cannot be found: this machine has no network, or no name server",
    "ConnectError": "cannot be reached",
    "ConnectionRefusedError": "cannot be reached",
    "TimeoutError": "does not answer in time",
    "ReadTimeout": "does not answer in time",
    "ConnectTimeout": "does not answer in time",
    "SSLCertVerificationError": "has a certificate that is not trusted here: something stands between",
}
"""What the network's errors mean, by the names of their classes: those of the libraries below vary."""

_RUN = 128
"""Parts of one request: the hub's download addresses expire."""

_BEAT_SECONDS = 5.0
_TELL_SECONDS = 0.5
KEEP_SECONDS = 2.0
"""Interval of notes. Parts after the last note are fetched again after a crash."""


def main() -> None:
    """Fetches the model that the command line names."""
    forbid_core_files()
    parser = argparse.ArgumentParser(
        prog="python -m sealring.node.models.fetch", description="started by the node daemon"
    )
    parser.add_argument("model")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--part", action="store_true", help="headers, and what the file .wanted names")
    parser.add_argument("--commit", default="", help="of the repository, if nothing of it is here yet")
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.configure("fetch")
    control = socket.socket(fileno=arguments.control_fd)
    frames = FrameSocket(control)
    threading.Thread(target=die_with_daemon, args=(control,), daemon=True).start()
    try:
        fetch(arguments.model, arguments.home, frames.send, part=arguments.part, commit=arguments.commit)
    except SealringError as error:
        log.error("model_not_fetched", reason=error.reason, why=error.message, exc_info=error.__cause__)
        frames.send(engine_pb2.HubEvent(problem=to_problem(error)))
        sys.exit(1)


def fetch(model: str, home: Path, send: Send, *, part: bool = False, commit: str = "") -> Path:
    """Fetches a model at the commit of the parts that are here, at `commit`, or at its newest one. The folder
    that it is in then, before `PartialModel.publish`. `send` takes the HubEvents meanwhile.

    Raises NotFound (MODEL_NOT_FOUND), Unavailable (HUB_OFFLINE, HUB_UNREACHABLE), ResourceExhausted
    (DISK_FULL), ModelError (MODEL_TOO_LARGE, MODEL_PART_DAMAGED, OTHER_MODEL_VERSION, BAD_HUB_ANSWER)."""
    try:
        partial = PartialModel(home, model)
        note = note_of(partial.path)
        here = commit_of(partial.path, note)
        check_commit(model, here, commit)
        repository = Repository(model, here or commit, _Beat(send))
        manifest = repository.manifest()
        if note is not None:
            if _shape(note.manifest) != _shape(manifest):
                raise ModelError(
                    f"the hub has another version of {model} than the part that is here",
                    hint="remove it first: sealring model remove",
                    reason="OTHER_MODEL_VERSION",
                )
            manifest = note.manifest
        fetching = HubFetch(repository, partial, send)
        ranges = _wanted(partial.path / WANTED) if part else None
        wanted = beginnings(manifest) if part else every_part(manifest)
        commit, checked, hub_files = repository.commit, False, repository.hub_files
        if note is not None:  # parts from a member may have no known commit, and then the added have none
            commit, checked, hub_files = note.commit, note.checked, note.hub_files
        partial.begin(
            *(manifest, wanted, commit),
            checked=checked,
            hub_files=hub_files,
            whole=True,
            tell=fetching.tell_seldom,
        )
        fetching.fill(known=not part)
        if part:
            wanted = headers(manifest, wanted, partial.path)
            partial.want(wanted)
            fetching.fill(known=False)
            if ranges is not None:
                partial.want(with_ranges(manifest, wanted, ranges))
                fetching.fill()
        return partial.path
    except SealringError:
        raise
    except Exception as error:
        raise refusal(error, model) from error


class _Beat:
    """Shows the daemon that this process works, also without progress to report."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() >= self._sent + _BEAT_SECONDS:
            self._send(engine_pb2.HubEvent())
            self._sent = time.monotonic()


class HubFetch:
    """Fills a partial model from a repository."""

    def __init__(self, repository: Repository, partial: PartialModel, send: Send) -> None:
        self._repository = repository
        self._partial = partial
        self._send = send
        self._kept = self._told = time.monotonic()
        self._known = False

    def fill(self, *, known: bool = True) -> None:
        """Fetches and notes the missing parts. It says the bytes in all if it is `known` that no others are
        wanted.

        Raises Unavailable (HUB_UNREACHABLE) if parts are still missing then, and what `PartialModel` and
        `Repository` raise.
        """
        self._known = known
        self._tell()
        for index, parts in enumerate(self._partial.missing()):
            if not parts:
                continue
            file = self._repository.files[index]
            if not file.sha256:
                content = memoryview(self._repository.small(index))
                for part in parts:
                    self._add(index, part, [content[part * PART : (part + 1) * PART]])
                continue
            for run in runs(parts):
                for first in range(run.start, run.stop, _RUN):
                    self._bring(index, range(first, run.stop)[:_RUN])
        if any(self._partial.missing()):
            raise Unavailable(
                "the hub did not send all that was asked for", hint="try again", reason="HUB_UNREACHABLE"
            )
        complete = [index for index in range(len(self._repository.files)) if self._partial.complete(index)]
        for index in complete:
            self._check(index)
        self._partial.keep(checked=len(complete) == len(self._repository.files))

    def _check(self, index: int) -> None:
        """Checks a complete file, also one of an earlier process that ended before its check."""
        file = self._repository.files[index]
        if file.sha256 and self._partial.sha256(index) != file.sha256:
            self._partial.forget(index)
            raise damaged(file.name)

    def _bring(self, index: int, parts: range) -> None:
        size, end = self._repository.files[index].size, parts.stop * PART
        part, pieces, length = parts.start, list[memoryview](), 0
        for data in self._repository.read(index, parts.start * PART, min(end, size)):
            left = memoryview(data)
            while left:
                piece = left[: min(PART, size - part * PART) - length]
                pieces.append(piece)
                self.tell_seldom(length)
                length, left = length + len(piece), left[len(piece) :]
                if length == min(PART, size - part * PART):
                    self._add(index, part, pieces)
                    part, pieces, length = part + 1, [], 0

    def _add(self, index: int, part: int, pieces: Sequence[bytes | memoryview]) -> None:
        self._partial.add(index, part, pieces)
        if self._partial.complete(index):
            self._check(index)  # before the note: a file that is complete after a crash is checked
        self._tell()
        if time.monotonic() >= self._kept + KEEP_SECONDS:
            self._partial.keep()
            self._kept = time.monotonic()

    def tell_seldom(self, coming: int = 0) -> None:
        """Says what `_tell` does, at most every half second."""
        if time.monotonic() >= self._told + _TELL_SECONDS:
            self._tell(coming)

    def _tell(self, coming: int = 0) -> None:
        """Says how many bytes are here, with those of a part that is `coming`."""
        size = self._partial.size if self._known else 0
        self._send(engine_pb2.HubEvent(size=size, done=self._partial.done + coming))
        self._told = time.monotonic()


def _shape(manifest: Manifest) -> list[tuple[str, int]]:
    return [(one.name, one.size) for one in manifest.files]


def _wanted(file: Path) -> list[tuple[str, int, int]] | None:
    """The ranges that the daemon has written, which it does once it has the headers."""
    try:
        return [(name, first, end) for name, first, end in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return None


def refusal(error: BaseException, model: str) -> SealringError:
    """The error of the tree for one of huggingface_hub, which wraps the first error in others."""
    from huggingface_hub import errors

    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
        return Unavailable("HF_HUB_OFFLINE keeps the hub away", hint="unset it", reason="HUB_OFFLINE")
    if any(isinstance(one, errors.RepositoryNotFoundError) for one in chain):
        return not_found(model, "check the id; a gated or private model needs HF_TOKEN")
    why = _WHY.get(type(chain[-1]).__name__, f"does not give the model ({type(chain[-1]).__name__})")
    return Unavailable(
        f"the Hugging Face hub {why}",
        hint="check this machine's network, and try again: parts that have arrived are kept; or fetch it on "
        "a node that reaches the hub (sealring model pull --node)",
        reason="HUB_UNREACHABLE",
    )


def die_with_daemon(control: socket.socket) -> None:
    """Ends this process once the daemon's end of the socket is closed."""
    control.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
