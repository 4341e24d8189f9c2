"""What a coordinator's settings may be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sealring.coordinator.settings import MOST_ADDRESSES, CoordinatorSettings
from sealring.mesh.system.networks import own_addresses
from sealring.mesh.trust.levels import TrustLevel


@pytest.mark.parametrize(
    "fields",
    [
        {"cluster": ""},
        {"cluster": "a"},
        {"cluster": "home-2"},
        {"cluster": "a" * 63},
        {"advertise": ["192.0.2.1", "2001:db8::1", "mac.local", "a" * 63 + ".example"]},
        {"listen": "0.0.0.0:7700", "advertise": ["mac.local"]},
        {"listen": "[2001:db8::1]:7700"},
    ],
)
def test_names_and_addresses_of_one_host_are_taken(fields: dict[str, Any]) -> None:
    CoordinatorSettings(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"cluster": "Home"},
        {"cluster": "-home"},
        {"cluster": "a" * 64},
        {"advertise": ["0.0.0.0"]},
        {"advertise": ["::"]},
        {"advertise": ["no host"]},
        {"advertise": ["a" * 64]},
        {"advertise": [".".join(["a" * 60] * 5)]},
        {"listen": "[::]:7700"},
        {"listen": "nowhere"},
        {"join_listen": "nowhere"},
        {"unknown": 1},
    ],
)
def test_what_names_no_host_or_every_host_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CoordinatorSettings(**fields)


def test_lists_are_bounded_and_settings_are_not_changed() -> None:
    CoordinatorSettings(roster_key_files=["key"] * 15, advertise=[f"host-{one}" for one in range(16)])
    for fields in ({"roster_key_files": ["key"] * 16}, {"advertise": [f"host-{one}" for one in range(17)]}):
        with pytest.raises(ValidationError):
            CoordinatorSettings(**fields)
    hashes = [f"{one:064x}" for one in range(257)]
    CoordinatorSettings(allowed_manifests=hashes[1:])
    for wrong in (hashes, ["ab" * 31], ["AB" * 32]):
        with pytest.raises(ValidationError):
            CoordinatorSettings(allowed_manifests=wrong)
    label = ".".join(["a" * 63] * 3 + ["a" * 61])
    assert len(label) == 253
    CoordinatorSettings(advertise=[label])
    with pytest.raises(ValidationError):
        CoordinatorSettings(advertise=[label + "a"])
    made = CoordinatorSettings()
    assert not made.software_identity_allowed
    assert made.trust_floor is TrustLevel.SOFTWARE
    with pytest.raises(ValidationError):
        made.cluster = "other"


def test_who_listens_at_every_address_is_reached_at_those_that_the_machine_has() -> None:
    own = [one.host for one in own_addresses()][:MOST_ADDRESSES] or ["127.0.0.1"]
    made = CoordinatorSettings(listen="0.0.0.0:7700")
    assert made.hosts() == tuple(own)
    assert made.addresses() == tuple(f"{host}:7700" for host in own)
    named = CoordinatorSettings(advertise=[f"host-{number}" for number in range(6)])
    assert len(named.hosts()) == 6
    assert named.addresses() == tuple(f"host-{number}:7700" for number in range(MOST_ADDRESSES))


def test_members_are_told_the_first_host_and_the_port_that_is_open() -> None:
    made = CoordinatorSettings(listen="0.0.0.0:7700", advertise=["mac.local", "192.0.2.1", "mac.local"])
    assert made.hosts() == ("mac.local", "192.0.2.1")
    assert (made.main_address(), made.main_address(5)) == ("mac.local:7700", "mac.local:5")
    assert CoordinatorSettings(listen="[2001:db8::1]:0").main_address(5) == "[2001:db8::1]:5"
