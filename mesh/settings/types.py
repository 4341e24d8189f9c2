"""Types that the settings of several components share; pydantic reports invalid values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from sealring.mesh.errors import SealringError
from sealring.mesh.names import check_name
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.levels import TrustLevel
from sealring.mesh.units import parse_duration, parse_size, show_duration, show_size


@dataclass(frozen=True)
class Written:
    """The written form of a setting: the name of its value in help, and a function that writes a value."""

    metavar: str
    show: Callable[[Any], str] = str


def _checked(check: Callable[[str], object]) -> AfterValidator:
    def validate(value: str) -> str:
        try:
            check(value)
        except SealringError as error:
            raise ValueError(error.message) from error  # `config.load` takes the hint from the cause
        return value

    return AfterValidator(validate)


def _check_floor(level: TrustLevel) -> TrustLevel:
    if level is TrustLevel.NONE:
        raise ValueError("a member of no trust level cannot be let in")
    return level


def _text(parse: Callable[[str], float]) -> BeforeValidator:
    """Requires a unit in text; a number, in code and TOML, is in seconds or bytes."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Address = Annotated[str, _checked(parse_address), Written("HOST:PORT")]
"""host:port."""

Addresses = Annotated[
    list[Address],
    BeforeValidator(lambda value: [one for each in _listed(value) for one in str(each).split(",")]),
    Field(min_length=1, max_length=16),
]
"""Several host:port, separated by commas in text."""

Name = Annotated[str, _checked(partial(check_name, what="the")), Written("NAME")]
"""The name of a machine."""

ClusterName = Annotated[
    str, _checked(lambda name: name and check_name(name, "the cluster's")), Written("NAME")
]
"""The name of a cluster; empty if none was chosen."""

Seconds = Annotated[float, _text(parse_duration), Written("TIME", show_duration)]
"""A duration such as `90s`; a number of seconds in code."""

WholeSeconds = Annotated[int, _text(parse_duration), Written("TIME", show_duration)]
"""A duration without fractions of a second."""

Size = Annotated[int, _text(parse_size), Written("SIZE", show_size)]
"""A size such as `5GB`; a number of bytes in code."""

TrustFloor = Annotated[TrustLevel, AfterValidator(_check_floor), Written("|".join(list(TrustLevel)[1:]), str)]
"""The lowest acceptable trust level."""
