"""Which model an HTTP edge serves, and what it may answer instead."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sealring.cli.calls.models import Served, served
from sealring.mesh.errors import ConfigError, InvalidInput, NotFound, Unauthenticated, Unavailable


class Edge(BaseHTTPRequestHandler):
    answer: tuple[int, str] = (200, "")
    asked: tuple[str, str | None] = ("", None)

    def do_GET(self) -> None:
        type(self).asked = (self.path, self.headers["authorization"])
        status, text = self.answer
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def edge() -> Iterator[Any]:
    class Mine(Edge):
        url = ""

    with HTTPServer(("127.0.0.1", 0), Mine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        Mine.url = f"http://127.0.0.1:{server.server_port}"
        yield Mine
        server.shutdown()
        thread.join()


def models(**contexts: Any) -> tuple[int, str]:
    return 200, json.dumps({"data": [{"id": name, "context_length": one} for name, one in contexts.items()]})


def test_the_only_model_or_the_one_that_is_named(edge: Any) -> None:
    edge.answer = models(demo=4096)
    assert served(edge.url, None) == (Served("demo", 4096),) * 2
    assert edge.asked == ("/v1/models", "Bearer none")
    edge.answer = models(demo=4096, other=8)
    assert served(f"{edge.url}/below", "srk_x", "other") == (Served("other", 8),) * 2
    assert edge.asked == ("/below/v1/models", "Bearer srk_x")
    for named, said in (("", "2 models are served here"), ("mine", "no model 'mine'")):
        with pytest.raises(NotFound, match=said) as raised:
            served(edge.url, None, named)
        assert raised.value.reason == "MODEL_NOT_FOUND"
        assert raised.value.hint.endswith("one of demo, other")
    edge.answer = models(**{f"m{number:02}": 1 for number in range(30)})
    with pytest.raises(NotFound) as raised:
        served(edge.url, None)
    assert raised.value.hint.endswith(", m19")
    edge.answer = models()
    with pytest.raises(NotFound):
        served(edge.url, None)


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ([("big", 9, []), ("tiny", 3, ["x", "small"])], ("big", "tiny")),
        ([("big", 9, []), ("small", 3, [])], ("big", "small")),
        ([("small", 3, [])], ("small", "small")),
        ([("big", 9, ["smaller"])], ("big", "big")),
    ],
)
def test_the_small_model_is_the_one_that_is_named_so(edge: Any, listed: Any, found: Any) -> None:
    data = [{"id": name, "context_length": size, "aliases": aliases} for name, size, aliases in listed]
    edge.answer = 200, json.dumps({"data": data})
    assert tuple(one.name for one in served(edge.url, None)) == found


def test_whether_a_model_sees_is_known_where_it_is_told(edge: Any) -> None:
    for told, sees in (({}, False), ({"capabilities": None}, False), ({"capabilities": ["vision"]}, True)):
        edge.answer = 200, json.dumps({"data": [{"id": "demo", "context_length": 8, **told}]})
        assert served(edge.url, None) == (Served("demo", 8, sees),) * 2


def test_names_that_could_be_more_than_names_are_no_models(edge: Any) -> None:
    """They are put into files of other programs."""
    edge.answer = models(**{'a"b': 1, "a b": 1, "": 1, "x" * 129: 1, "y" * 128: 7})
    assert served(edge.url, None) == (Served("y" * 128, 7),) * 2


@pytest.mark.parametrize("status", [401, 403])
def test_who_wants_a_key_is_told_from_who_is_not_there(edge: Any, status: int) -> None:
    edge.answer = (status, "{}")
    with pytest.raises(Unauthenticated) as raised:
        served(edge.url, None)
    assert raised.value.reason == "KEY_REFUSED"
    assert "--api-key-file" in raised.value.hint


def test_an_edge_that_cannot_reach_its_gateway_is_not_taken_for_none(edge: Any) -> None:
    edge.answer = (503, '{"error": {"message": "no gateway answers"}}')
    with pytest.raises(Unavailable) as raised:
        served(edge.url, None)
    assert "no gateway answers" in str(raised.value)
    assert "sealring proxy" not in raised.value.hint
    edge.answer = (502, "<html>")
    with pytest.raises(Unavailable) as raised:
        served(edge.url, None)
    assert "sealring proxy" in raised.value.hint


NO_LISTS = (
    *("", "{", "[]", "7", '{"data": 7}', '{"data": [7]}', '{"data": [{"id": 7}]}', "[" * 20_000),
    '{"data": [{"id": "m"}]}',
    '{"data": [{"id": "m", "context_length": null}]}',
    '{"data": [{"id": "m", "context_length": "x"}]}',
    '{"data": [{"id": "m", "context_length": Infinity}]}',
)


def test_what_is_no_list_of_models_is_no_edge_and_no_more_than_a_mebibyte_is_read(edge: Any) -> None:
    for text in NO_LISTS:
        edge.answer = (200, text)
        with pytest.raises(Unavailable) as raised:
            served(edge.url, None)
        assert raised.value.reason == "NO_EDGE"
    text = models(m=1)[1]
    for size, kept in ((1 << 20, True), ((1 << 20) + 1, False)):
        edge.answer = (200, text + " " * (size - len(text) - 1) + "x")
        with pytest.raises(Unavailable) if kept else contextlib.nullcontext():
            served(edge.url, None)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8081", "ftp://127.0.0.1", "http://", "http://[::1", "http://h:port", "http://h:99999"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        served(url, None)
    assert raised.value.reason == "BAD_ADDRESS"


def test_a_key_goes_over_tls_alone_to_another_machine() -> None:
    """A server that speaks no TLS gets nothing of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        got: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                got.append(connection.recv(4096))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unavailable):
            served(f"https://127.0.0.1:{server.getsockname()[1]}", "srk_x")
        thread.join()
    assert got[0][:1] == b"\x16", "a TLS handshake"
    assert b"srk_x" not in got[0]


def test_a_key_never_leaves_the_machine_in_clear() -> None:
    with pytest.raises(ConfigError) as raised:
        served("http://192.0.2.1:1", "srk_x")
    assert raised.value.reason == "KEY_IN_CLEAR"
