from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sealring.mesh.system.networks import hosts_with
from sealring.node.settings import NodeSettings, default_name


def test_the_defaults_are_safe() -> None:
    settings = NodeSettings()
    assert settings.listen.startswith("127.0.0.1:")
    assert settings.ring_host == "127.0.0.1"
    assert not settings.allow_downloads
    assert not settings.software_identity_allowed
    assert settings.advertised() == ("127.0.0.1:7710",)


@pytest.mark.parametrize(
    "fields",
    [
        {"listen": "nowhere"},
        {"listen": "0.0.0.0:7710"},
        {"listen": "127.0.0.1:99999"},
        {"ring_host": "0.0.0.0"},
        {"ring_host": "::1"},
        {"ring_host": "example.com"},
        {"name": "Bad Name"},
        {"name": ""},
        {"models": ["relative"]},
        {"typo": 1},
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NodeSettings(**fields)


def test_what_is_advertised() -> None:
    assert NodeSettings(listen="127.0.0.1:0").advertised() == ()
    assert NodeSettings(listen="127.0.0.1:0").advertised(81) == ("127.0.0.1:81",)
    assert NodeSettings(listen="[::1]:80").advertised() == ("[::1]:80",)
    far = NodeSettings(listen="0.0.0.0:80", advertise=["mac.local:80", "10.0.0.1:80"])
    assert far.advertised(80) == ("mac.local:80", "10.0.0.1:80")
    assert Path(NodeSettings().state_dir).is_absolute()


def test_with_measured_links_the_daemon_is_at_all_addresses_of_the_machine() -> None:
    """What is named by hand stays."""
    made = NodeSettings(listen="203.0.113.1:7710", measure_links=True)
    assert made.bound == "0.0.0.0:7710"
    assert made.advertised() == tuple(f"{host}:7710" for host in hosts_with("203.0.113.1", 4))
    for listen in ("127.0.0.1:7710", "[::1]:7710", "mac.local:7710"):
        one = NodeSettings(listen=listen, measure_links=True)
        assert (one.bound, one.advertised()) == (listen, (listen,))
    named = NodeSettings(listen="10.0.0.1:80", advertise=["mac.local:80"], measure_links=True)
    assert (named.bound, named.advertised()) == ("10.0.0.1:80", ("mac.local:80",))


def test_limits_are_taken_and_what_is_beyond_them_is_not() -> None:
    folder = Path("/models")
    devices = [f"{letter * 16}=rdma_en{number}" for number, letter in enumerate("abcdefghi")]
    for good, bad in (
        ({"memory_limit": 64 << 20}, {"memory_limit": (64 << 20) - 1}),
        ({"models": [folder] * 32}, {"models": [folder] * 33}),
        ({"advertise": ["a:1"] * 8}, {"advertise": ["a:1"] * 9}),
        ({"ring_host": "10.0.0.1"}, {"ring_host": "224.0.0.1"}),
        ({"rdma_devices": [f"{'a' * 16}=rdma_en3"]}, {"rdma_devices": ["mini=rdma_en3"]}),
        ({"rdma_devices": [f"{'a' * 52}=rdma_en3"]}, {"rdma_devices": [f"{'a' * 16}=/dev/en3"]}),
        (
            {"rdma_devices": [f"{'a' * 16}=rdma_en3", f"{'b' * 16}=rdma_en4"]},
            {"rdma_devices": [f"{'a' * 16}=rdma_en3", f"{'b' * 16}=rdma_en3"]},
        ),
        ({"rdma_devices": devices[:8]}, {"rdma_devices": devices}),
        ({"enclave_helper": folder}, {"enclave_helper": Path("helper")}),
        ({"device_attestation": folder}, {"device_attestation": Path("chain.pem")}),
    ):
        NodeSettings(**good)
        with pytest.raises(ValidationError):
            NodeSettings(**bad)
    made = NodeSettings()
    assert (made.memory_limit, made.hybrid_sealing_key, made.enclave_helper) == (None, False, None)
    with pytest.raises(ValidationError):
        made.name = "other"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Jane's MacBook.local", "jane-s-macbook"),
        ("-mac-", "mac"),
        ("a" * 70, "a" * 63),
        ("a" * 62 + "-b", "a" * 62),
        ("\u30de\u30c3\u30af", "node"),
        ("", "node"),
    ],
)
def test_a_node_is_called_as_its_machine_as_far_as_that_is_a_name(
    monkeypatch: pytest.MonkeyPatch, host: str, name: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert default_name() == name
    assert NodeSettings().name == name
