"""A Hugging Face hub on loopback, with the real one's paths, headers and redirects."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

COMMIT = "c" * 40


class LocalHub:
    """Serves one repository. Large files are redirected to another path, as to the hub's storage."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.repository = repository
        self.files = files
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of every request."""
        self.searched: list[dict[str, str]] = []
        """Parameters of every search."""
        self.tokens: set[tuple[str, str | None]] = set()
        """First part of the path, and authorization, of every request."""
        self.etags: dict[str, str] = {}
        """Those that it told before a file was changed."""
        self.commit = COMMIT
        self.lie = ""
        """What it does wrong: "range", "whole", "longer" or "commit"."""
        self.breaks_after: int | None = None
        """Bytes of a body after which the connection is cut, once."""
        self.stalls: threading.Event | None = None
        """Instead of being cut it is held until this is set."""
        self.stalled = threading.Event()
        self.busy = 0
        """Requests for files that are answered with a wait of a day."""
        self.pads_list = 0
        """Bytes that its list of files has more than it needs."""
        self.refusal: Iterator[bytes] | None = None
        """The body of an error that answers the request for its list of files."""
        self.url = self.storage = ""

    def large(self, name: str) -> bool:
        return name.endswith(".safetensors")

    def etag(self, name: str) -> str:
        if name in self.etags:
            return self.etags[name]
        content = self.files[name]
        if self.large(name):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def sent(self, method: str, part: str) -> list[str]:
        """The ranges of the requests with this method whose path holds `part`."""
        return [ranges for verb, path, ranges in self.asked if verb == method and part in path]


def _siblings(hub: LocalHub) -> list[dict[str, Any]]:
    found = []
    for name, content in hub.files.items():
        one: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": hub.etag(name)}
        if hub.large(name):
            one["lfs"] = {"sha256": hub.etag(name), "size": len(content), "pointerSize": 134}
        found.append(one)
    return found


def _tree(hub: LocalHub) -> list[dict[str, Any]]:
    found = []
    for name, content in hub.files.items():
        one: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": "b" * 40}
        if hub.large(name):
            one["lfs"] = {"oid": hub.etag(name), "size": len(content), "pointerSize": 134}
        found.append(one)
    return found


@contextmanager
def local_hub(repository: str, files: dict[str, bytes]) -> Iterator[LocalHub]:
    hub = LocalHub(repository, files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append((self.command, path, self.headers.get("range", "")))
            hub.tokens.add((path.split("/")[1], self.headers.get("authorization")))
            name = path.partition("/resolve/")[2].partition("/")[2] or path.rpartition("/")[2]
            revision = path.partition("/revision/")[2]
            model = {
                "id": repository,
                "sha": revision or hub.commit,
                "siblings": _siblings(hub),
                "private": False,
                "description": "x" * hub.pads_list,
            }
            if path == "/api/models":
                words = parse_qs(self.path.partition("?")[2])
                hub.searched.append({name: found[0] for name, found in words.items()})
                named = words["search"][0].lower() in repository.lower()
                found = {"id": repository, "downloads": 7, "likes": 2, "tags": "x" * hub.pads_list}
                self.give_json([found] if named else [])
            elif path.startswith(f"/api/models/{repository}/tree/"):
                self.give_json(_tree(hub))
            elif hub.refusal is not None and path.startswith("/api/"):
                self.send_response(503)
                self.send_header("connection", "close")
                self.end_headers()
                with suppress(OSError):
                    for piece in hub.refusal:
                        self.wfile.write(piece)
            elif path.startswith(f"/api/models/{repository}"):
                self.give_json(model)
            elif path.startswith(f"/{repository}/resolve/") and name in hub.files:
                self.resolve(name, body=body)
            elif path.startswith("/storage/") and name in hub.files:
                self.give(hub.files[name], {"etag": f'"{hub.etag(name)}"'}, body=body)
            else:
                self.send_response(404)
                self.send_header("x-error-code", "RepoNotFound")
                self.send_header("content-length", "0")
                self.end_headers()

        def resolve(self, name: str, *, body: bool) -> None:
            commit = self.path.split("/resolve/")[1].split("/")[0]
            headers = {
                "x-repo-commit": "d" * 40 if hub.lie == "commit" else commit,
                "etag": f'"{hub.etag(name)}"',
            }
            if not hub.large(name):
                self.give(hub.files[name], headers, body=body)
                return
            self.send_response(302)
            for key, value in headers.items():
                self.send_header("x-linked-etag" if key == "etag" else key, value)
            self.send_header("x-linked-size", str(len(hub.files[name])))
            self.send_header("location", f"{hub.storage}/storage/{name}")
            self.send_header("content-length", "0")
            self.end_headers()

        def give_json(self, value: object) -> None:
            self.give(json.dumps(value).encode(), {"content-type": "application/json"}, body=True)

        def give(self, content: bytes, headers: dict[str, str], *, body: bool) -> None:
            if hub.busy and "/storage/" in self.path:
                hub.busy -= 1
                self.send_response(429)
                self.send_header("retry-after", "86400")
                self.send_header("content-length", "0")
                self.end_headers()
                return
            start, total, status = 0, len(content), 200
            asked = self.headers.get("range", "")
            if asked.startswith("bytes=") and hub.lie != "whole":
                first, _, last = asked[6:].partition("-")
                start, end = int(first), int(last) + 1 if last else total
                start += hub.lie == "range"
                content, status = content[start:end], 206
                headers = {**headers, "content-range": f"bytes {start}-{start + len(content) - 1}/{total}"}
            if hub.lie == "longer" and status == 206:
                content += b"more"
            self.send_response(status)
            for key, value in {**headers, "accept-ranges": "bytes"}.items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if not body:
                return
            if hub.breaks_after is not None and len(content) > hub.breaks_after:
                self.wfile.write(content[: hub.breaks_after])
                hub.breaks_after = None
                self.close_connection = True
                if hub.stalls is not None:
                    hub.stalled.set()
                    hub.stalls.wait(200)
                return
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.storage = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
