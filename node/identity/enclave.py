"""The identity key in a Mac's Secure Enclave, behind a helper process (`deploy/enclave`).

A frame is a length (4 bytes, big endian) and that number of bytes. A request begins with its operation, one
byte: 1 asks for the public key, 2 for a signature, 3 for a derived secret. For a signature the label's length
(1 byte), the label and the content follow, for a secret the seed (65 bytes). An answer is a status (1 byte, 0
for success), then the key (65 bytes), the DER signature, the secret (32 bytes), or an error in ASCII.

The helper prepends the domain itself, so that it signs only under labels of sealring, and never returns a
key of the enclave. It reports the reason of its end on standard error.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import structlog

from sealring.mesh.crypto.identity import load_public_key, member_id, verify
from sealring.mesh.crypto.keys import KeyType, Label
from sealring.mesh.errors import SealringError, Unavailable
from sealring.mesh.system.starting import starting

log = structlog.get_logger()

MAX_REQUEST_BYTES = 64 << 10
SECRET_BYTES = 32
_MAX_RESPONSE_BYTES = 256
_PUBLIC_KEY, _SIGN, _DERIVE, _DONE = 1, 2, 3, 0
_STOP_SECONDS = 1.0
_LENGTH = struct.Struct(">I")
_MAX_LINE = 200
_MAX_LINES = 20


class EnclaveSigner:
    """A `Signer` over one helper process, which is started when needed and again after a failure.

    A helper that is silent, answers anything but what is due, or signs with another key than the one it
    first named is killed, and the call raises Unavailable (ENCLAVE_FAILED). Safe to use from several threads.
    """

    key_type: str = KeyType.SECURE_ENCLAVE

    def __init__(self, helper: Path, key: Path, *, seconds: float = 10.0) -> None:
        """`key` is the file in which the helper keeps the enclave's own wrapped key, made when it is missing.

        Raises Unavailable (ENCLAVE_FAILED).
        """
        self._command: Sequence[str] = (str(helper), "--key", str(key))
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._notes: _Notes | None = None
        self._public_key = self._ask_key()

    @property
    def public_key(self) -> bytes:
        """The uncompressed point, 65 bytes."""
        return self._public_key

    def sign(self, label: Label, content: bytes) -> bytes:
        """A DER ECDSA signature over `signing_input(label, content)`, verified before it is given out."""
        request = bytes([_SIGN, len(label.value)]) + label.value + content
        if len(request) > MAX_REQUEST_BYTES:
            raise _failed("what is to be signed is too large")
        signature = self._call(request)
        try:
            verify(self._public_key, label, content, signature)
        except SealringError:
            self.close()
            raise _failed("its signature is not by the identity key") from None
        return signature

    def derive(self, seed: bytes) -> bytes:
        """A secret of 32 bytes that only this Mac's enclave makes of `seed`, a P-256 point."""
        secret = self._call(bytes([_DERIVE]) + seed)
        if len(secret) != SECRET_BYTES:
            self.close()
            raise _failed("its secret has a wrong length")
        return secret

    def close(self) -> None:
        """End the helper; the next call starts another."""
        with self._lock:
            self._kill()

    def __repr__(self) -> str:
        return f"EnclaveSigner({member_id(self._public_key)})"

    def _ask_key(self) -> bytes:
        key = self._call(bytes([_PUBLIC_KEY]))
        try:
            load_public_key(key)
        except SealringError:
            self.close()
            raise _failed("its public key is not a P-256 point") from None
        return key

    def _call(self, request: bytes) -> bytes:
        with self._lock:
            try:
                response = self._exchange(request, time.monotonic() + self._seconds)
            except OSError as error:
                said = self._said()
                self._kill()
                raise _failed(f"{error.strerror or 'its pipe broke'}{said}") from None
            except BaseException:
                self._kill()
                raise
        if response[0] != _DONE:
            text = response[1:].decode("ascii", errors="replace")
            raise _failed(f"it says: {text if text.isprintable() else 'something unreadable'}")
        return response[1:]

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._write(process.stdin.fileno(), _LENGTH.pack(len(request)) + request, deadline)
        source = process.stdout.fileno()
        (length,) = _LENGTH.unpack(self._read(source, _LENGTH.size, deadline))
        if not 1 <= length <= _MAX_RESPONSE_BYTES:
            raise _failed("its answer has an impossible length")
        return self._read(source, length, deadline)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with starting():
                process = subprocess.Popen(  # noqa: S603 - the helper that the node's owner names
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env={},
                )
            assert process.stdin is not None
            assert process.stderr is not None
            os.set_blocking(process.stdin.fileno(), False)
            self._process, self._notes = process, _Notes(process.stderr)
            self._notes.start()
        return self._process

    def _write(self, target: int, data: bytes, deadline: float) -> None:
        while data:
            _wait(target, select.POLLOUT, deadline)
            data = data[os.write(target, data) :]

    def _read(self, source: int, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            _wait(source, select.POLLIN, deadline)
            part = os.read(source, size - len(data))
            if not part:
                raise _failed(f"it ended{self._said()}")
            data += part
        return data

    def _said(self) -> str:
        """What a helper that has ended said last, as the end of a sentence."""
        if self._notes is None:
            return ""
        self._notes.join(_STOP_SECONDS)
        return f": {self._notes.last}" if self._notes.last else ""

    def _kill(self) -> None:
        process, self._process, self._notes = self._process, None, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)


class _Notes(threading.Thread):
    """Logs the lines that a helper says on standard error, until it has ended."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(name="enclave-notes", daemon=True)
        self._stream = stream
        self.last = ""

    def run(self) -> None:
        with self._stream, contextlib.suppress(OSError):
            lines = 0
            while line := self._stream.readline(_MAX_LINE):
                shown = line.decode("ascii", errors="replace").strip()
                if shown.isprintable() and shown and lines < _MAX_LINES:
                    self.last, lines = shown, lines + 1
                    log.warning("enclave_helper", said=shown)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Waits for a pipe. `select.select` takes no descriptor above 1,023, and a daemon has more."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise _failed("it does not answer")


def _failed(why: str) -> Unavailable:
    return Unavailable(
        f"the Secure Enclave helper failed: {why}",
        hint="run the helper by hand, see deploy/enclave/README.md",
        reason="ENCLAVE_FAILED",
    )
