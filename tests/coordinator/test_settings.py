"""What a coordinator's settings may be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sealring.coordinator.settings import CoordinatorSettings


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
