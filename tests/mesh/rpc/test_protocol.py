"""What is said where two releases meet that do not mix."""

from __future__ import annotations

from importlib import metadata

import pytest

from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.mesh.rpc import protocol
from sealring.mesh.rpc.protocol import PROTOCOL_VERSION, check_release, own_release, software_version
from sealring.v1 import proof_pb2


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
    assert newer.message == (
        f"node alpha runs sealring 2.0.0rc1 (protocol {PROTOCOL_VERSION + 1}) and the coordinator runs "
        f"sealring {software_version()} (protocol {PROTOCOL_VERSION}): they cannot work together"
    )
    assert newer.hint.startswith("update the coordinator;")
    assert refusal(proof_pb2.Release(software="0.0.1")).hint.startswith("update node alpha;")


@pytest.mark.parametrize("software", ["", "x" * 65, "1.0\n", "1.0 and more", "\x1b[2J"])
def test_what_is_no_version_is_not_repeated(software: str) -> None:
    message = refusal(proof_pb2.Release(software=software)).message
    assert message.startswith("node alpha runs sealring of no known version (protocol 0) and")


def test_an_installation_without_a_version_still_says_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(protocol, "software_version", software_version.__wrapped__)
    with pytest.raises(ConfigError) as caught:
        protocol.software_version()
    assert caught.value.reason == "BROKEN_INSTALLATION"
    assert own_release() == proof_pb2.Release(protocol=PROTOCOL_VERSION)
