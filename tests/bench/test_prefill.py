"""What is counted of long prompts and of the streams beside them."""

from __future__ import annotations

from typing import Any

import pytest

from bench import prefill
from bench.openai_client import Reply, still_coming
from sealring.mesh.errors import Unavailable


async def test_a_prompt_without_an_answer_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time would be that after which the client gave up."""
    for broken in (Reply(0.0), Reply(0.0, arrivals=[1.0], error="timeout")):

        async def ask(*_: Any, broken: Reply = broken, **__: Any) -> Reply:
            return broken

        monkeypatch.setattr(prefill, "ask", ask)
        with pytest.raises(Unavailable, match="a prompt was not answered"):
            await prefill.answered("", 8)


def test_a_stream_that_ends_before_the_prompt_is_no_measurement() -> None:
    """The rest of the prompt would have gone beside fewer."""
    running = Reply(0.0, arrivals=[1.0])
    still_coming([running])
    with pytest.raises(Unavailable, match="ended while it was watched: timeout") as raised:
        still_coming([running, Reply(0.0, arrivals=[1.0], error="timeout", ended=1.5)])
    assert "tokens" in raised.value.hint
