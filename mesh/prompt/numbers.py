"""Numbers of a request beside its sampling: one line each has the name, the type and the bounds.

The client library takes them by these types, and HTTP bodies have a field for each
(sealring/api/sampling.py). The client and the gateway check the bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict, Unpack, cast

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.options import MAX_TOKENS, Bounds, bounds_of, plain_of
from sealring.mesh.ring.composition import MAX_CHOICES
from sealring.mesh.trust.levels import MAX_SCORE
from sealring.v1 import inference_pb2 as inference

MAX_PRIORITY = 10
MAX_DEADLINE_MS = 24 * 3600 * 1000
_MAX_INT32 = (1 << 31) - 1


class RequestNumbers(TypedDict, total=False):
    """Fields of GenerateRequest, of which `n` is `choices` there. What is left out, or None, is unset."""

    max_tokens: Annotated[int, Bounds(0, MAX_TOKENS)]
    """The most tokens of the answer; 0: as many as the context holds."""
    min_trust: Annotated[int, Bounds(0, MAX_SCORE)]
    """A ring with a member that scores less gets nothing."""
    n: Annotated[int, Bounds(1, MAX_CHOICES)]
    """The number of answers."""
    priority: Annotated[int, Bounds(-MAX_PRIORITY, MAX_PRIORITY)]
    """The lower, the earlier among this client's requests."""
    deadline_ms: Annotated[int, Bounds(0, MAX_DEADLINE_MS)]
    """The answer begins within this time or is refused; 0: no deadline."""
    keep_alive: Annotated[int | None, Bounds(-_MAX_INT32, _MAX_INT32)]
    """Seconds without a request after which a model on demand is unloaded; 0: at once, below 0: never. None:
    as it was deployed."""


BOUNDS = bounds_of(RequestNumbers)
PLAIN = plain_of(RequestNumbers)

_FIELDS = {name: name for name in BOUNDS} | {"n": "choices"}
"""The name of each in the contract."""


def validate_numbers(**numbers: Unpack[RequestNumbers]) -> None:
    """Raises InvalidInput for a number out of bounds: BAD_MAX_TOKENS, BAD_MIN_TRUST, BAD_CHOICES,
    BAD_PRIORITY, BAD_DEADLINE, BAD_KEEP_ALIVE."""
    given = cast("dict[str, int | None]", numbers)
    for name, bounds in BOUNDS.items():
        if (number := given.get(name)) is not None and not bounds.hold(number):
            raise InvalidInput(
                f"{name} is out of bounds",
                hint=f"give a number {bounds}",
                reason=f"BAD_{_FIELDS[name].removesuffix('_ms').upper()}",
                param=name,
                limit=bounds.most,
            )


def request_of(numbers: RequestNumbers) -> inference.GenerateRequest:
    """A request with these numbers and nothing else.

    Raises InvalidInput as `validate_numbers`, TypeError for a name that there is not.
    """
    if unknown := numbers.keys() - BOUNDS.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    validate_numbers(**numbers)
    given: dict[str, Any] = {_FIELDS[name]: number for name, number in numbers.items() if number is not None}
    return inference.GenerateRequest(**{"choices": 1, **given})


def numbers_of(request: inference.GenerateRequest) -> RequestNumbers:
    """The numbers that a request sets."""
    fields = {field.name: value for field, value in request.ListFields()}
    return cast("RequestNumbers", {name: fields[own] for name, own in _FIELDS.items() if own in fields})
