"""Reports that come from another machine: bounded, and harmless on a terminal."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.cli.doctor import show
from sealring.cli.doctor.daemon import with_daemon
from sealring.cli.doctor.report import (
    MAX_REPORT_BYTES,
    Bridge,
    Connection,
    Facts,
    Port,
    Report,
    Severity,
    decode,
    encode,
    note,
    ok,
    problem,
    unknown,
    warning,
    worst,
)
from sealring.cli.doctor.view import View
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.addresses import parse_address
from sealring.node.settings import NodeSettings
from sealring.v1 import diagnosis_pb2

FACTS = Facts(
    name="mini",
    packages={"mlx": "1"},
    connections=(Connection(member="a", address="10.0.0.1:1", error="TIMEOUT", milliseconds=3000),),
    ports=(Port(uuid="A", peer="B"),),
    bridges=(Bridge(name="bridge0", members=("en1",)),),
)


def test_a_report_travels_whole() -> None:
    report = Report(facts=FACTS, findings=(ok("a.b", "fine"), problem("c", "bad", "why", "do", "run")))
    assert decode(encode(report)) == report
    assert worst(report.findings) is Severity.PROBLEM
    assert worst([]) is Severity.OK


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_else_is_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidInput):  # and nothing else
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * MAX_REPORT_BYTES,
        b'{"findings": [{"id": "a b", "severity": "ok", "what": ""}]}',
        b'{"findings": [{"id": "a", "severity": "fatal", "what": ""}]}',
        b'{"facts": {"memory": -1}}',
        b'{"facts": {"name": "' + b"x" * 201 + b'"}}',
        b" " * (MAX_REPORT_BYTES + 1),
    ],
)
def test_what_is_out_of_bounds_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(data)


def test_texts_are_cut_and_hold_no_terminal_codes() -> None:
    found = decode(b'{"findings": [{"id": "a", "severity": "ok", "what": "\\u001b[2J' + b"x" * 5000 + b'"}]}')
    assert found.findings[0].what.startswith("?[2Jxxx")
    assert len(found.findings[0].what) == 1000


def test_a_report_that_would_be_too_long_is_shortened() -> None:
    long = Report(findings=tuple(note(f"n{number}", "x" * 1000, "y" * 1000) for number in range(500)))
    data = encode(long)
    assert len(data) <= MAX_REPORT_BYTES
    assert decode(data).findings[0].id == "report.cut"


def test_the_worst_comes_first() -> None:
    found = [ok("a", "fine"), warning("b", "odd", "because"), problem("c", "bad", "why", "mend it", "mend")]
    assert show.lines([*found, unknown("d", "the sky", "dark")]) == [
        "problem  bad",
        "         why: why",
        "         do:  mend it",
        "           $ mend",
        "warning  odd",
        "         why: because",
        "note     could not tell: the sky",
        "         why: dark",
        "ok       fine",
    ]
    assert show.summary(found) == "1 problem, 1 warning, 0 notes, 1 ok"


def test_the_longest_address_that_a_member_may_announce_spoils_no_report() -> None:
    longest = f"{'h' * 253}:65535"
    parse_address(longest)
    told = diagnosis_pb2.DiagnoseResponse(
        connections=[diagnosis_pb2.PeerConnection(member="m", address=longest, error="UNKNOWN_HOST")]
    )
    connections = with_daemon(View(NodeSettings()), told).connections
    assert connections is not None
    sent = encode(Report(facts=Facts(connections=connections, addresses=(longest,))))
    assert decode(sent).facts.connections[0].address == longest
