"""Reports that come from another machine: bounded, and harmless on a terminal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.doctor.daemon import with_daemon
from sealring.doctor.report import (
    Bridge,
    Facts,
    Report,
    Severity,
    ThunderboltPort,
    TriedConnection,
    decode,
    encode,
    lines,
    note,
    ok,
    problem,
    summary,
    unknown,
    warning,
    worst,
)
from sealring.doctor.view import View
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.addresses import parse_address
from sealring.node.settings import NodeSettings
from sealring.v1 import diagnosis_pb2

PORT, CONNECTION = {"uuid": "x"}, {"member": "m", "address": "a"}
FACTS = Facts(
    name="mini",
    packages={"mlx": "1"},
    connections=(TriedConnection(member="a", address="10.0.0.1:1", error="TIMEOUT", milliseconds=3000),),
    ports=(ThunderboltPort(uuid="A", peer="B"),),
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
    "document",
    [
        "[" * 131072,
        "{}" + " " * 131071,
        {"findings": [{"id": "a b", "severity": "ok", "what": ""}]},
        {"findings": [{"id": "a", "severity": "fatal", "what": ""}]},
        {"findings": [{"id": "a", "severity": "ok", "what": ""}] * 513},
        {"facts": {"protocol": -1}},
        {"facts": {"memory": -1}},
        {"facts": {"wired_limit": -1}},
        {"facts": {"connections": [CONNECTION | {"milliseconds": -1}]}},
    ],
    ids=range(9),
)
def test_what_is_out_of_bounds_is_refused(document: Any) -> None:
    with refused("BAD_REPORT", InvalidInput):
        decode((document if isinstance(document, str) else json.dumps(document)).encode())


def test_what_is_at_its_bounds_is_taken() -> None:
    assert decode(b"{}" + b" " * 131070) == Report()
    one = {"id": "a", "severity": "ok", "what": ""}
    assert len(decode(json.dumps({"findings": [one] * 512}).encode()).findings) == 512


@pytest.mark.parametrize(
    ("facts", "most"),
    [
        *((lambda number, name=name: {name: "x" * number}, 200) for name in ("name", "os_build", "rdma")),
        (lambda number: {"protocol": number}, 1 << 20),
        (lambda number: {"memory": number}, 1 << 60),
        (lambda number: {"wired_limit": number}, 1 << 60),
        (lambda number: {"packages": {f"p{one}": "1" for one in range(number)}}, 32),
        (lambda number: {"addresses": ["a"] * number}, 64),
        (lambda number: {"addresses": ["a" * number]}, 300),
        (lambda number: {"connections": [CONNECTION] * number}, 512),
        (lambda number: {"connections": [CONNECTION | {"milliseconds": number}]}, 1 << 40),
        (lambda number: {"ports": [PORT] * number}, 64),
        (lambda number: {"bridges": [{"name": "b"}] * number}, 64),
        (lambda number: {"bridges": [{"name": "b", "members": ["m"] * number}]}, 64),
    ],
)
def test_every_fact_is_bounded(facts: Callable[[int], dict[str, Any]], most: int) -> None:
    def answered(number: int) -> Report:
        return decode(json.dumps({"facts": facts(number)}).encode())

    assert answered(0)
    assert answered(most)
    with pytest.raises(InvalidInput):
        answered(most + 1)


def test_texts_are_cut_and_hold_no_terminal_codes() -> None:
    found = decode(b'{"findings": [{"id": "a", "severity": "ok", "what": "\\u001b[2J' + b"x" * 5000 + b'"}]}')
    assert found.findings[0].what.startswith("?[2Jxxx")
    assert len(found.findings[0].what) == 1000


@pytest.mark.parametrize(("beyond", "cut"), [(0, False), (1, True)])
def test_a_report_is_cut_only_where_it_is_too_long(beyond: int, cut: bool) -> None:
    def made(*lengths: int) -> Report:
        return Report(findings=tuple(note("a", "x" * length) for length in (*lengths, *[1000] * 125)))

    missing = 131072 + beyond - len(encode(made(1, 1, 1)))
    assert 0 < missing < 2000
    found = decode(encode(made(1, 1 + missing // 2, 1 + missing - missing // 2)))
    assert (found.findings[0].id == "report.cut") == cut


def test_facts_alone_may_be_too_long_and_end_it_all_the_same() -> None:
    """Nothing is left to leave out; the reader refuses the report."""
    bridge = Bridge(name="b", members=("m" * 200,) * 64)
    assert len(encode(Report(facts=Facts(bridges=(bridge,) * 64), findings=(ok("a", "fine"),)))) > 131072


def test_the_worst_comes_first() -> None:
    found = [ok("a", "fine"), warning("b", "odd", "because"), problem("c", "bad", "why", "mend it", "mend")]
    assert lines([*found, unknown("d", "the sky", "dark")]) == [
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
    assert summary(found) == "1 problem, 1 warning, 0 notes, 1 ok"


def test_the_longest_address_that_a_member_may_announce_spoils_no_report() -> None:
    longest = f"{'h' * 253}:65535"
    parse_address(longest)
    answer = diagnosis_pb2.DiagnoseResponse(
        connections=[diagnosis_pb2.PeerConnection(member="m", address=longest, error="UNKNOWN_HOST")]
    )
    connections = with_daemon(View(NodeSettings()), answer).connections
    assert connections is not None
    sent = encode(Report(facts=Facts(connections=connections, addresses=(longest,))))
    assert decode(sent).facts.connections[0].address == longest
