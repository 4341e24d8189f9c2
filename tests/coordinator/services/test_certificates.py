"""The form of a renewal request; `test_renewal.py` has renewals over real streams."""

from __future__ import annotations

import pytest

from sealring.coordinator.services.certificates import _check_form
from sealring.mesh.errors import InvalidInput


@pytest.mark.parametrize(("size", "good"), [(0, False), (1, True), (4096, True), (4097, False)])
def test_a_signing_request_has_a_length(size: int, good: bool) -> None:
    if good:
        _check_form(bytes(size))
        return
    with pytest.raises(InvalidInput) as caught:
        _check_form(bytes(size))
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_CSR", "csr")
