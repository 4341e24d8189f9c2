"""Errors of the tree, expected by their reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from sealring.mesh.errors import SealringError


@contextlib.contextmanager
def refused(reason: str, kind: type[SealringError] = SealringError) -> Iterator[None]:
    """The block raises an error of this kind with this reason."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.reason == reason
