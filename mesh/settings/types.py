"""Types that the settings of several components share; what does not fit is told by pydantic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from sealring.mesh.errors import SealringError
from sealring.mesh.names import check_name
from sealring.mesh.settings.units import parse_duration, parse_size, show_duration, show_size
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.levels import TrustLevel


@dataclass(frozen=True)
class Written:
    """How a setting is written: what help calls its value, and a value as its owner would write it."""

    metavar: str
    show: Callable[[Any], str] = str


def _checked(check: Callable[[str], object]) -> AfterValidator:
    def validate(value: str) -> str:
        try:
            check(value)
        except SealringError as error:
            raise ValueError(error.message) from error  # its hint is told too
        return value

    return AfterValidator(validate)


def _check_floor(level: TrustLevel) -> TrustLevel:
    if level is TrustLevel.NONE:
        raise ValueError("a member of no trust level cannot be let in")
    return level


def _text(parse: Callable[[str], float]) -> BeforeValidator:
    """Text has to name its unit; a number, as code and TOML have it, is in seconds or bytes."""
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
"""Several host:port; in text with commas between them."""

Name = Annotated[str, _checked(partial(check_name, what="the")), Written("NAME")]
"""Of a machine."""

ClusterName = Annotated[
    str, _checked(lambda name: name and check_name(name, "the cluster's")), Written("NAME")
]
"""Empty where no name was chosen."""

Seconds = Annotated[float, _text(parse_duration), Written("TIME", show_duration)]
"""A duration such as `90s`; a number of seconds in code."""

WholeSeconds = Annotated[int, _text(parse_duration), Written("TIME", show_duration)]
"""The same, without fractions of a second."""

Size = Annotated[int, _text(parse_size), Written("SIZE", show_size)]
"""A size such as `5GB`; a number of bytes in code."""

TrustFloor = Annotated[
    TrustLevel, AfterValidator(_check_floor), Written("software|self_signed|hardware", str)
]
"""The least trust level that is good enough."""
