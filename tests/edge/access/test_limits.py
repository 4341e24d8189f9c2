from __future__ import annotations

import pytest

from sealring.edge.access.limits import UnderWay
from sealring.mesh.errors import InvalidInput, ResourceExhausted


def test_under_way() -> None:
    under_way = UnderWay(2)
    with under_way.more("a"), under_way.more("b"):
        with under_way.more("a"), pytest.raises(ResourceExhausted) as caught, under_way.more("a"):
            pass
        assert caught.value.reason == "TOO_MANY_AT_ONCE"
        assert caught.value.metadata["retry_after"] == "1"
        with pytest.raises(ZeroDivisionError), under_way.more("a"):
            raise ZeroDivisionError
        with under_way.more("a"):
            pass
    assert not under_way.counts


def test_several_count_as_many_and_as_no_more_than_can_ever_be() -> None:
    under_way = UnderWay(3)
    with under_way.more("a"), under_way.more("a", 2):
        with pytest.raises(ResourceExhausted), under_way.more("a"):
            pass
        with pytest.raises(InvalidInput) as caught, under_way.more("a", 3):
            pass
    assert (caught.value.reason, caught.value.metadata["limit"]) == ("TOO_MANY_ANSWERS", "3")
    with under_way.more("a", 2):
        pass
