from __future__ import annotations

import pytest

from sealring.gateway.access.limits import UnderWay
from sealring.mesh.errors import ResourceExhausted


def test_under_way() -> None:
    under_way = UnderWay(2)
    with under_way.one_more("a"), under_way.one_more("b"):
        with under_way.one_more("a"), pytest.raises(ResourceExhausted) as caught, under_way.one_more("a"):
            pass
        assert caught.value.reason == "TOO_MANY_AT_ONCE"
        assert caught.value.metadata["retry_after"] == "1"
        with pytest.raises(ZeroDivisionError), under_way.one_more("a"):
            raise ZeroDivisionError
        with under_way.one_more("a"):
            pass
    assert not under_way._counts
