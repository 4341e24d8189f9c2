"""What is counted of long prompts and of the streams beside them."""

from __future__ import annotations

import pytest

from bench.openai_client import Reply
from bench.prefill import _counts
from sealring.mesh.errors import Unavailable


def test_a_prompt_without_an_answer_is_no_measurement() -> None:
    """Its time would be that after which the client gave up."""
    for broken in (Reply(0.0), Reply(0.0, arrivals=[1.0], error="timeout")):
        with pytest.raises(Unavailable, match="a prompt was not answered"):
            _counts(Reply(0.0, arrivals=[1.0], ended=1.0), broken)


def test_a_stream_that_ends_before_the_prompt_is_no_measurement() -> None:
    """The rest of the prompt would have gone beside fewer."""
    running = Reply(0.0, arrivals=[1.0])
    _counts(Reply(0.0, arrivals=[2.0], ended=2.0), streams=[running])
    with pytest.raises(Unavailable, match="ended while it was watched: timeout") as raised:
        _counts(streams=[running, Reply(0.0, arrivals=[1.0], error="timeout", ended=1.5)])
    assert "--stream-tokens" in raised.value.hint
