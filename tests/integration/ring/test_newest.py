"""Helpers of the API makers' newest SDKs, with a real ring in clear and sealed (`make clients NEWEST=1`)."""

from pathlib import Path
from typing import Any

import pytest
from agents import NEWEST, converse
from ringtest import AGENTS

pytestmark = AGENTS
CAPITAL = "The capital of France is Paris."
HELPERS = {
    "openai": {
        "a call's arguments": "Paris",
        "a chat's class": "City",
        "a chat's stream": CAPITAL,
        "a response's class": "City",
        "a response's stream": CAPITAL,
    },
    "anthropic": {
        "a runner's last answer": "It is 21 degrees and sunny in Paris.",
        "a message's class": "City",
        "a message's stream": CAPITAL,
    },
    "ollama": {
        "a call of a function": "21 degrees and sunny",
        "a chat's class": "City",
        "a chat's stream": CAPITAL,
    },
}


@pytest.mark.parametrize("name", HELPERS)
async def test_helpers_do_what_they_do_with_their_makers(
    name: str, ring: Any, sealed: str, tmp_path: Path
) -> None:
    urls = [ring.cluster.http_url, sealed]
    assert await converse(name, urls, tmp_path, "newest.py", NEWEST) == [HELPERS[name]] * 2
