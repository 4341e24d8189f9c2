"""What a coordinator's settings may be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sealring.coordinator.settings import CoordinatorSettings
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
        {"listen": "0.0.0.0:7700"},
        {"listen": "[::]:7700"},
        {"listen": "nowhere"},
        {"join_listen": "nowhere"},
        {"unknown": 1},
    ],
)
def test_what_names_no_host_or_every_host_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CoordinatorSettings(**fields)


@pytest.mark.parametrize(
    ("field", "low", "default", "high"),
    [
        ("roster_lifetime", 2, 720, 900),
        ("certificate_lifetime", 300, 86_400, 2_592_000),
        ("heartbeat_timeout", 0.2, 6, 60),
        ("challenge_interval", 1, 300, 300),
        ("challenge_timeout", 0.5, 30, 30),
        ("prepare_timeout", 1, 120, 3600),
        ("commit_timeout", 1, 60, 600),
        ("profile_timeout", 1, 60, 600),
        ("drain_timeout", 0, 60, 3600),
        ("replace_after", 1, 30, 2_592_000),
    ],
)
def test_numbers_have_their_default_and_limits(field: str, low: float, default: float, high: float) -> None:
    assert getattr(CoordinatorSettings(), field) == default
    for value in (low, high):
        assert getattr(CoordinatorSettings(**{field: value}), field) == value
    for value in (low - 1 if low >= 1 else -1e-9 if low == 0 else low / 2, high + 1):
        with pytest.raises(ValidationError):
            CoordinatorSettings(**{field: value})


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


def test_members_are_told_the_first_host_and_the_port_that_is_open() -> None:
    made = CoordinatorSettings(listen="0.0.0.0:7700", advertise=["mac.local", "192.0.2.1", "mac.local"])
    assert made.hosts() == ("mac.local", "192.0.2.1")
    assert (made.main_address(), made.main_address(5)) == ("mac.local:7700", "mac.local:5")
    assert CoordinatorSettings(listen="[2001:db8::1]:0").main_address(5) == "[2001:db8::1]:5"
