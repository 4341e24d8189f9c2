"""The one line of a process that does something apart."""

from __future__ import annotations

import json
import os
import sys

import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine.apart import answer


@pytest.mark.parametrize("fails", [False, True])
def test_a_result_or_an_error_is_the_one_line_and_noise_goes_elsewhere(
    capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    def work() -> dict[str, int]:
        os.write(sys.stdout.fileno(), b"noise")
        if fails:
            raise ModelError("no", hint="why", reason="NO_MODEL", param="x")
        return {"a": 1}

    out = os.dup(sys.stdout.fileno())
    try:
        status = answer(work)
    finally:
        os.dup2(out, sys.stdout.fileno())
        os.close(out)
    printed = capfd.readouterr()
    assert printed.err.endswith("noise")
    assert printed.out.count("\n") == 1
    found = json.loads(printed.out)
    if fails:
        error = ModelError("no", hint="why", reason="NO_MODEL", param="x")
        parts = {name: getattr(error, name) for name in ("code", "reason", "message", "hint", "metadata")}
        assert (status, found) == (1, {"problem": parts})
    else:
        assert (status, found) == (0, {"result": {"a": 1}})
