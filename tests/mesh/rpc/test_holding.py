"""Bytes that requests hold, by key."""

from __future__ import annotations

import pytest

from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.rpc import Holding


def test_no_key_takes_more_than_is_left_for_the_others() -> None:
    holding = Holding(16)
    for key, most in (("one", 8), ("two", 4), ("three", 2)):
        with pytest.raises(ResourceExhausted) as caught:
            holding.take(key, most + 1)
        assert (caught.value.reason, caught.value.metadata["retry_after"]) == ("TOO_MANY_BYTES", "1")
        holding.take(key, most)
    assert len(holding) == 14
    holding.give_back("one", 8)
    with pytest.raises(ResourceExhausted):
        holding.take("two", 4)
    holding.take("two", 3)
    for key, held in (("two", 7), ("three", 2)):
        holding.give_back(key, held)
    assert len(holding) == 0
