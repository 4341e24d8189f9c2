from __future__ import annotations

import pytest

from mesh import errors
from mesh.errors import Internal, InvalidInput, SealringError
from mesh.problem import from_parts, from_problem, to_problem

TREE = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, SealringError)]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_survives_the_trip(kind: type[SealringError]) -> None:
    back = from_problem(to_problem(kind("it broke", hint="mend it", reason="BROKEN", part="a")))
    assert back.code == (kind.code if kind.code != "UNKNOWN" else "INTERNAL")
    assert (back.message, back.hint, back.reason) == ("it broke", "mend it", "BROKEN")
    assert back.metadata == {"part": "a"}


def test_other_exceptions_are_masked() -> None:
    problem = to_problem(ValueError("secret"))
    assert problem.reason == "INTERNAL"
    assert "secret" not in str(problem)


def test_an_unknown_code_is_internal() -> None:
    assert type(from_parts("NO_SUCH", "", "x", "")) is Internal


def test_an_error_shows_its_hint() -> None:
    assert str(InvalidInput("bad", hint="good")) == "bad (hint: good)"
    assert str(InvalidInput("bad")) == "bad"
