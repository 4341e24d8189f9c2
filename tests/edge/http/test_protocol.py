"""What is taken of a request before anybody looks at it: headers, chunks and one length."""

from __future__ import annotations

import h11
import pytest

from sealring.edge.http.protocol import MAX_HEADER_BYTES, MAX_HEADERS, MIN_CHUNK_BYTES, _Connection

HOST = (b"host", b"localhost")


def parse(*headers: tuple[bytes, bytes], body: bytes = b"") -> list[object]:
    """What a request with these headers, besides the host, comes to. Raises RemoteProtocolError."""
    connection = _Connection(h11.SERVER, 2 * MAX_HEADER_BYTES)
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in (HOST, *headers))
    connection.receive_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n" + body)
    events: list[object] = []
    while not events or not isinstance(events[-1], h11.EndOfMessage | type(h11.NEED_DATA)):
        events.append(connection.next_event())
    return events


def test_so_many_headers_are_taken_and_no_more() -> None:
    many = [(b"x-%d" % number, b"") for number in range(MAX_HEADERS)]
    parse(*many[:-1])
    with pytest.raises(h11.RemoteProtocolError, match="too many headers"):
        parse(*many)


@pytest.mark.parametrize("count", [1, 50])
def test_headers_are_so_large_together_with_what_stands_between_them(count: int) -> None:
    """A colon, a space and an end of line for each, so that many small ones are not free."""
    others = [(b"x-%02d" % number, b"1") for number in range(1, count)]
    taken = sum(len(name) + len(value) + 4 for name, value in (HOST, *others))
    left = MAX_HEADER_BYTES - taken - len(b"x") - 4
    parse(*others, (b"x", b"v" * left))
    with pytest.raises(h11.RemoteProtocolError, match="too many headers"):
        parse(*others, (b"x", b"v" * (left + 1)))


def test_a_body_has_one_length() -> None:
    assert isinstance(parse((b"content-length", b"2"), body=b"ab")[-1], h11.EndOfMessage)
    assert isinstance(parse((b"transfer-encoding", b"chunked"), body=b"0\r\n\r\n")[-1], h11.EndOfMessage)
    with pytest.raises(h11.RemoteProtocolError, match="two lengths"):
        parse((b"content-length", b"2"), (b"transfer-encoding", b"chunked"))


CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\r\n\r\n" + HIDDEN, True),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\ncontent-length: 3\r\n\r\nabc", False),
        (b"GET / HTTP/1.1\nhost: a\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: a\r\n\n" + HIDDEN, False),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\rz\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\r\n\tcontent-length: 3\r\n\r\n", False),
        (CHUNKED + b"1\r\n\n\r\n0\r\nx: y\r\n\r\n" + HIDDEN, True),
        (CHUNKED + b"0\r\nx: y\n\n" + HIDDEN, False),
        (CHUNKED + b"0\r\n\n" + HIDDEN, False),
        (CHUNKED + b"0\r\nx: y\r\n z\r\n\r\n", False),
        (CHUNKED + b"1\nx\r\n0\r\n\r\n", False),
        (CHUNKED + b"1;x\ny\r\nx\r\n0\r\n\r\n", False),
        (CHUNKED + b"1\r\nx\n0\r\n\r\n", False),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_lines_end_where_every_proxy_ends_them(said: bytes, taken: bool, size: int) -> None:
    """What it takes for the value of a header would else be a body's length here, or another request."""
    connection = _Connection(h11.SERVER, MAX_HEADER_BYTES)
    events: list[object] = []
    try:
        for start in range(0, len(said), size):
            connection.receive_data(said[start : start + size])
            while connection.their_state is not h11.DONE:
                events.append(connection.next_event())
                if events[-1] is h11.NEED_DATA:
                    break
    except h11.RemoteProtocolError:
        assert not taken
    else:
        assert taken
        assert connection.trailing_data[0] == HIDDEN


def chunks(count: int, size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, b"x" * size) * count + b"0\r\n\r\n"


def test_small_chunks_are_few() -> None:
    chunked = (b"transfer-encoding", b"chunked")
    parse(chunked, body=chunks(MIN_CHUNK_BYTES, 1))
    with pytest.raises(h11.RemoteProtocolError, match="too many small chunks"):
        parse(chunked, body=chunks(MIN_CHUNK_BYTES + 3, 1))
    parse(chunked, body=chunks(4 * MIN_CHUNK_BYTES, MIN_CHUNK_BYTES))
    with pytest.raises(h11.RemoteProtocolError, match="too many small chunks"):
        parse(chunked, body=chunks(4 * MIN_CHUNK_BYTES, MIN_CHUNK_BYTES // 2))


def test_each_request_of_a_connection_has_chunks_of_its_own() -> None:
    connection = _Connection(h11.SERVER, MAX_HEADER_BYTES)
    request = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(2):
        connection.receive_data(request + chunks(MIN_CHUNK_BYTES, 1))
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
