"""What the section `cli` of a settings file may say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from sealring.cli.settings import CliSettings


@pytest.mark.parametrize(("timeout", "fine"), [(0, False), (0.5, True), (3600, True), (3600.5, False)])
def test_a_call_lasts_an_hour_at_most(timeout: float, fine: bool) -> None:
    with nullcontext() if fine else pytest.raises(ValidationError):
        assert CliSettings(timeout=timeout).timeout == timeout


def test_settings_are_as_they_were_read() -> None:
    settings: Any = CliSettings()
    with pytest.raises(ValidationError):
        settings.timeout = 1
