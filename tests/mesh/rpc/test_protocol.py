"""What is said where two releases meet that do not mix."""

from __future__ import annotations

import sys

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.mesh.rpc import (
    PROTOCOL_VERSION,
    agree,
    check_release,
    check_speaks,
    own_release,
    software_version,
)
from sealring.mesh.rpc.protocol import OLDEST_PROTOCOL
from sealring.v1 import (
    control_pb2,
    links_pb2,
    membership_pb2,
    model_pb2,
    models_pb2,
    proof_pb2,
    trace_pb2,
)

GIVEN_UP = {
    6: {("Change", 10), ("Hello", 7), ("Hello", 8), ("Hello", 9), ("StepDone", 4)},
    8: {("Attached", 9)},
    11: {("RowOutput", 12)},
    12: {("Attached", 15), ("Attached", 20), ("Decode", 4), ("StepDone", 5), ("StepDone", 6)},
}
"""The fields that messages between machines have lost, by the first protocol without them."""


def refusal(release: proof_pb2.Release) -> FailedPrecondition:
    with pytest.raises(FailedPrecondition) as caught:
        check_release(release, "node alpha", "the coordinator")
    assert caught.value.reason == "INCOMPATIBLE_VERSION"
    return caught.value


def test_one_protocol_mixes_whatever_the_software() -> None:
    check_release(own_release(), "node alpha", "the coordinator")
    check_release(proof_pb2.Release(software="9.9", protocol=PROTOCOL_VERSION), "node alpha", "me")


def test_both_versions_are_named_and_the_older_one_is_to_be_updated() -> None:
    newer = refusal(proof_pb2.Release(software="2.0.0rc1", protocol=PROTOCOL_VERSION + 1))
    spoken = f"protocols {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
    assert newer.message == (
        f"node alpha runs sealring 2.0.0rc1 (protocol {PROTOCOL_VERSION + 1}) and the coordinator runs "
        f"sealring {software_version()} ({spoken}): they cannot work together"
    )
    assert newer.hint.startswith("update the coordinator;")
    assert refusal(proof_pb2.Release(software="0.0.1")).hint.startswith("update node alpha;")


def test_a_field_that_is_lost_makes_another_protocol() -> None:
    """A machine that still sends the field is not understood. Readers of 5 refuse several rings of a node."""
    lost = set()
    for module in (control_pb2, links_pb2, membership_pb2, model_pb2, models_pb2, proof_pb2, trace_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            for span in message.reserved_range:
                lost |= {(message.name, number) for number in range(span.start, span.end)}
    given_up = [fields for protocol, fields in GIVEN_UP.items() if protocol <= PROTOCOL_VERSION]
    assert lost == set().union(*given_up), "raise PROTOCOL_VERSION, or reserve what has been lost"
    hint = refusal(proof_pb2.Release(software="0.1.0", protocol=5, oldest=5)).hint
    assert hint.startswith("update node alpha;")


@pytest.mark.parametrize("software", ["", "x" * 65, "1.0\n", "1.0 and more", "\x1b[2J"])
def test_what_is_no_version_is_not_repeated(software: str) -> None:
    message = refusal(proof_pb2.Release(software=software)).message
    assert message.startswith("node alpha runs sealring of no known version (protocol 0) and")


def test_an_installation_without_a_version_still_says_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder that was copied: no distribution is found on the path."""
    monkeypatch.setattr(sys, "path", [])
    software_version.cache_clear()
    with refused("BROKEN_INSTALLATION", ConfigError):
        software_version()
    assert own_release() == proof_pb2.Release(protocol=PROTOCOL_VERSION, oldest=OLDEST_PROTOCOL)


def release(oldest: int, newest: int) -> proof_pb2.Release:
    return proof_pb2.Release(software="1", protocol=newest, oldest=oldest)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=5))
def test_machines_agree_on_the_newest_that_all_speak(spans: list[tuple[int, int]]) -> None:
    spoken = {f"node {i}": range(low, low + more + 1) for i, (low, more) in enumerate(spans)}
    common = set.intersection(*(set(one) for one in spoken.values()))
    releases = {name: release(one[0], one[-1]) for name, one in spoken.items()}
    if common:
        assert agree(releases) == max(common)
        return
    with pytest.raises(FailedPrecondition) as caught:
        agree(releases)
    behind = caught.value.hint.removeprefix("update ").partition(";")[0]
    assert spoken[behind][-1] == min(one[-1] for one in spoken.values())


def test_a_range_is_told_and_one_that_is_none_is_its_newest() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        agree({"node a": release(2, 3), "node b": release(4, 4), "gateway c": release(3, 4)})
    assert caught.value.message == (
        "node a runs sealring 1 (protocols 2 to 3) and node b runs sealring 1 (protocol 4): "
        "they cannot work together"
    )
    assert agree({"one": release(9, 4), "other": release(4, 4)}) == 4


def test_a_ring_of_another_protocol_is_refused() -> None:
    check_speaks(PROTOCOL_VERSION, "ring demo-0")
    for other in (OLDEST_PROTOCOL - 1, PROTOCOL_VERSION + 1):
        with pytest.raises(FailedPrecondition) as caught:
            check_speaks(other, "ring demo-0")
        assert caught.value.message.startswith(f"ring demo-0 speaks protocol {other} and this machine runs")
