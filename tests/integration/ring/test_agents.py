"""Agents and frameworks call a tool, tell its result and go on, with a real ring in clear and sealed."""

import pytest
from agents import NAMES, converse
from ringtest import AGENTS

pytestmark = AGENTS
ANSWER = "It is 21 degrees and sunny in Paris."
WELCOME = "You are welcome! Is there anything else you would like to know?"
WHOLE = {"instructor": ["Paris"], "mini_swe_agent": ["Submitted"]}
"""Answers of agents that make one call and are done."""

CONVERSATIONS = {"llm": 1, "litellm": 3}
"""How many they hold with a server; others two."""


@pytest.mark.parametrize("name", NAMES)
async def test_a_tool_is_called_and_its_result_told(name, ring, sealed, tmp_path):
    expected = WHOLE.get(name) or [ANSWER, WELCOME] * CONVERSATIONS.get(name, 2)
    assert await converse(name, [ring.cluster.http_url, sealed], tmp_path) == [expected] * 2
