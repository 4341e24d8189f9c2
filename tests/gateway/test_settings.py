"""What a gateway's settings may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sealring.gateway.settings import GatewaySettings
from sealring.mesh.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("key_requests_per_second", 1e-9, 1e6),
        ("key_requests_at_once", 1, 100_000),
        ("peer_requests_per_second", 1e-9, 1e6),
        ("queue_limit", 1, 100_000),
        ("drain_timeout", 0, 600),
    ],
)
def test_numbers_have_limits(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(GatewaySettings(**{field: value}), field) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValidationError):
            GatewaySettings(**{field: value})


def test_settings_are_what_they_were_and_known() -> None:
    for fields in ({"unknown": 1}, {"name": "Not A Name"}):
        with pytest.raises(ValidationError):
            GatewaySettings(**fields)
    with pytest.raises(ValidationError):
        GatewaySettings().queue_limit = 5


@pytest.mark.parametrize("edge", ["http", "grpc"])
def test_a_certificate_and_its_key_go_together_and_open_an_edge_to_others(edge: str) -> None:
    certificate, key = f"{edge}_tls_certificate", f"{edge}_tls_key"
    for fields in ({certificate: Path("c")}, {key: Path("k")}):
        with pytest.raises(ConfigError) as caught:
            GatewaySettings(**fields)
        assert caught.value.reason == "TLS_INCOMPLETE"
    for address in ("0.0.0.0:80", "192.168.1.1:80", "[::]:80", "example.com:80"):
        beyond = {f"{edge}_listen": address}
        with pytest.raises(ConfigError) as caught:
            GatewaySettings(**beyond)
        assert caught.value.reason == "LOOPBACK_ONLY"
        made = GatewaySettings(**beyond, **{certificate: Path("c"), key: Path("k")})
        assert made.listens_beyond_loopback
    assert not GatewaySettings(**{certificate: Path("c"), key: Path("k")}).listens_beyond_loopback
