"""A repository of the Hugging Face hub as it was at one commit: its files, and ranges of their bytes.

The hub's answers are checked: names, sizes and commit of all files, and the range of each answer. The hub has
hashes of whole files only, so each file is checked once it is complete.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

from sealring.mesh.errors import ModelError, SealringError, Unavailable
from sealring.node.models.kept import hash_of_files
from sealring.node.models.listing import HubFile, address, bad_answer, files_of, found_in
from sealring.node.models.manifest import Manifest

_TRIES = 5
"""Failed requests in a row without a byte before the fetch fails."""

_WAIT_SECONDS = 1.0
"""Pause before a retry, doubled after each failure in a row. Retry-After is ignored."""

_ERROR_HEADERS = ("x-error-code", "x-error-message", "x-request-id")
"""Headers that explain an error."""

_SLOW_SECONDS = 60.0
_LEAST = 64 << 10
"""Least bytes that must arrive in that time."""


def search(words: str, most: int, *, mlx_only: bool) -> list[dict[str, Any]]:
    """The models whose names have these words, `most` at most, as `found_in` gives them. Those most fetched
    come first.

    Raises what huggingface_hub raises, ModelError (BAD_HUB_ANSWER).
    """
    from huggingface_hub import constants

    asked = {"search": words, "sort": "downloads", "limit": most} | ({"filter": "mlx"} if mlx_only else {})
    url = f"{constants.ENDPOINT}/api/models?{urlencode(asked)}"
    with _get(url, _authorization()) as response:
        return found_in(steady(response.iter_bytes()), most)


class Repository:
    """Raises what huggingface_hub raises, ModelError (BAD_HUB_ANSWER)."""

    def __init__(self, model: str, commit: str = "", beat: Callable[[], None] = lambda: None) -> None:
        """The repository at `commit`, or at its newest one. `beat` is called again and again while files are
        read. Raises as `files_of` too."""
        self._beat = beat
        from huggingface_hub import constants

        with _get(address(constants.ENDPOINT, model, commit), _authorization()) as response:
            self.commit, self.files = files_of(model, commit, steady(response.iter_bytes()))
        self._model = model

    @property
    def hub_files(self) -> str:
        """See `hash_of_files`."""
        return hash_of_files((one.name, one.size, one.sha256 or one.blob) for one in self.files)

    def manifest(self) -> Manifest:
        """A manifest of its files without hashes of parts. Raises ModelError (BAD_MANIFEST)."""
        return Manifest.unhashed([(one.name, one.size) for one in self.files])

    def read(self, index: int, first: int, end: int) -> Iterator[bytes]:
        """The bytes [first, end) of a file, in pieces. After a broken connection it resumes."""
        at, tries = first, 0
        while at < end:
            try:
                for piece in self._stream(self.files[index], at, end):
                    at, tries = at + len(piece), 0
                    self._beat()
                    yield piece
                tries += at < end
            except SealringError:
                raise
            except Exception:  # of any layer below: connection, TLS, HTTP, an address that has expired
                tries += 1
                if tries >= _TRIES:
                    raise
                time.sleep(_WAIT_SECONDS * 2 ** (tries - 1))
            if tries >= _TRIES:
                raise Unavailable("the hub sends nothing", hint="try again", reason="HUB_UNREACHABLE")

    def small(self, index: int) -> bytes:
        """All of a file that is in git itself, by its hash. Raises ModelError (MODEL_PART_DAMAGED)."""
        file = self.files[index]
        content = b"".join(self.read(index, 0, file.size))
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if blob != file.blob:
            raise damaged(file.name)
        return content

    def _stream(self, file: HubFile, first: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self._model, file.name, revision=self.commit)
        found = get_hf_file_metadata(url)
        seen = found.commit_hash, found.size, found.etag if file.sha256 else file.sha256
        if seen != (self.commit, file.size, file.sha256):
            raise bad_answer(f"it has another {file.name} than it listed")
        ours, theirs = urlsplit(url), urlsplit(found.location)
        if theirs.scheme not in ("https", ours.scheme):
            raise bad_answer(f"it leads to an address that is not encrypted for {file.name}")
        headers = _authorization()
        if theirs.netloc != ours.netloc:
            headers.pop("authorization", None)  # the storage's address is signed
        whole = first == 0 and end == file.size
        if not whole:
            headers["Range"] = f"bytes={first}-{end - 1}"
        with _get(found.location, headers) as response:
            expected = (200, None) if whole else (206, f"bytes {first}-{end - 1}/{file.size}")
            if (response.status_code, response.headers.get("content-range")) != expected:
                raise bad_answer(f"it does not give the range of {file.name} that it was asked for")
            left = end - first
            for piece in steady(response.iter_bytes()):
                left -= len(piece)
                if left < 0:
                    raise bad_answer(f"it sends more of {file.name} than it was asked for")
                yield piece


def _authorization() -> dict[str, str]:
    """The header with the user's token, if there is one."""
    from huggingface_hub import get_token

    token = get_token()
    return {"authorization": f"Bearer {token}"} if token else {}


@contextmanager
def _get(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """The hub's answer as a stream."""
    from huggingface_hub import constants, get_session, hf_raise_for_status

    headers = headers | {"Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:  # `read` tries again
        if not response.is_success:  # its body is not read: it has no size limit
            kept = {name: response.headers[name] for name in _ERROR_HEADERS if name in response.headers}
            bare = type(response)(response.status_code, headers=kept, request=response.request)
            hf_raise_for_status(bare)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise bad_answer("it comes in another encoding")
        yield response


def steady(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields `pieces`. Raises Unavailable (HUB_UNREACHABLE) if fewer than 64 KiB arrive in 60 s.

    Each byte resets the timeout of the connection, which therefore does not find a slow one. The consumer's
    time does not count.
    """
    waited, came, began = 0.0, 0, time.monotonic()
    for piece in pieces:
        waited, came = waited + time.monotonic() - began, came + len(piece)
        if waited >= _SLOW_SECONDS:
            if came < _LEAST:
                raise Unavailable(
                    f"the hub has sent {came} bytes in {waited:.0f} seconds",
                    hint="check the network, and try again: parts that have arrived are kept",
                    reason="HUB_UNREACHABLE",
                )
            waited, came = 0.0, 0
        yield piece
        began = time.monotonic()


def damaged(name: str) -> ModelError:
    return ModelError(f"{name} is not what the hub says", hint="try again", reason="MODEL_PART_DAMAGED")
