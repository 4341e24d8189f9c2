from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from sealring.mesh.crypto import Uncopyable
from sealring.mesh.errors import RecordError


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_has_one_owner_is_not_copied(way: Callable[[object], object]) -> None:
    with pytest.raises(RecordError, match="Uncopyable cannot be copied") as caught:
        way(Uncopyable())
    assert caught.value.reason == "KEY_COPIED"
