"""Types that the settings of several components share; what does not fit is told by pydantic."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from mesh.addresses import parse_address
from mesh.errors import SealringError


def _check_address(address: str) -> str:
    try:
        parse_address(address)
    except SealringError as error:
        raise ValueError(str(error)) from None
    return address


Address = Annotated[str, AfterValidator(_check_address)]
"""host:port."""
