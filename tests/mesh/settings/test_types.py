from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from sealring.mesh.settings.types import Address, Addresses, ClusterName, Name, Seconds, Size, TrustFloor
from sealring.mesh.trust.levels import TrustLevel


class Shape(BaseModel):
    address: Address = ""
    addresses: Addresses = []
    name: Name = ""
    cluster: ClusterName = ""
    wait: Seconds = 0
    size: Size = 0
    floor: TrustFloor = TrustLevel.HARDWARE


@pytest.mark.parametrize(
    ("field", "given", "held"),
    [
        ("address", "a:1", "a:1"),
        ("addresses", "a:1,b:2", ["a:1", "b:2"]),
        ("addresses", ["a:1,b:2", "c:3"], ["a:1", "b:2", "c:3"]),
        ("addresses", ["a:1"] * 16, ["a:1"] * 16),
        ("name", "studio-1", "studio-1"),
        ("cluster", "", ""),
        ("cluster", "home", "home"),
        ("wait", "90s", 90.0),
        ("wait", 1.5, 1.5),
        ("size", "5GB", 5_000_000_000),
        ("size", 7, 7),
        ("floor", TrustLevel.SOFTWARE, TrustLevel.SOFTWARE),
    ],
)
def test_what_a_setting_may_be(field: str, given: object, held: object) -> None:
    assert getattr(Shape(**{field: given}), field) == held


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("address", "a", "Value error"),
        ("addresses", [], "at least 1 item"),
        ("addresses", ["a:1"] * 17, "at most 16 items"),
        ("name", "Not A Name", "Value error"),
        ("name", "", "Value error"),
        ("cluster", "Not A Name", "Value error"),
        ("floor", TrustLevel.NONE, "no trust level"),
    ],
)
def test_what_a_setting_may_not_be(field: str, given: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Shape(**{field: given})
