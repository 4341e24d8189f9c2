"""Types that the settings of several components share; what does not fit is told by pydantic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from sealring.mesh.errors import SealringError
from sealring.mesh.prompt.names import check_name
from sealring.mesh.system.addresses import parse_address


def _checked(check: Callable[[str], object]) -> AfterValidator:
    def validate(value: str) -> str:
        try:
            check(value)
        except SealringError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


Address = Annotated[str, _checked(parse_address)]
"""host:port."""

Name = Annotated[str, _checked(partial(check_name, what="the"))]
"""Of a machine."""

ClusterName = Annotated[str, _checked(lambda name: name and check_name(name, "the cluster's"))]
"""Empty where no name was chosen."""
