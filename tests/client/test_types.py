"""Fields that a gateway or a head left out."""

from __future__ import annotations

from sealring.client.types import Delta, Model, TokenLogprob, Usage


def test_what_is_not_told_is_none() -> None:
    assert Delta("x", 1) == Delta("x", 1, (), 0)
    assert not TokenLogprob(1, b"x", -1.0, ()).prompt
    assert Usage(1, 2) == Usage(1, 2, 0)
    plain = Model("demo", 512, 10, 1)
    assert (plain.model_type, plain.rows) == ("", 0)
