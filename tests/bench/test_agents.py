"""Sessions of agents, at a server that answers at once and has a token for every word."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bench import agents
from bench.openai_client import Reply


class Server:
    """`bench.openai_client.ask` of a server that finds all but the last message in its cache."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    async def __call__(self, url: str, body: dict[str, Any], **options: Any) -> Reply:
        self.asked.append(body["messages"])
        sizes = [len(one["content"].split()) for one in body["messages"]]
        name = f"answer {len(self.asked)}"
        return Reply(
            0.0, [1.0], text=name, prompt_tokens=sum(sizes), cached_tokens=sum(sizes[:-1]), ended=2.0
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(agents, "ask", made)
    return made


async def sessions(count: int, **given: Any) -> list[list[Reply]]:
    return await agents.run("", "m", count=count, turns=4, scale=10.0, seed=1, seconds=9.0, **given)


async def test_each_turn_begins_with_the_turn_before(server: Server):
    await sessions(1)
    _, *asked = server.asked
    assert len(asked) == 4
    for number, (before, after) in enumerate(pairwise(asked), 2):
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": f"answer {number}"}
        assert agents.RESULT.least <= 10 * len(after[-1]["content"].split()) <= agents.RESULT.most


async def test_agents_of_one_program_share_its_beginning_and_nothing_else(server: Server):
    await sessions(4)
    firsts = [asked for asked in server.asked[1:] if len(asked) == 2]
    beginnings = [first["content"] for first, _ in firsts]
    assert beginnings[0] == beginnings[3]
    assert [len(text.split()) for text in beginnings[:3]] == [3000, 2000, 1200]
    assert len({task["content"] for _, task in firsts}) == 4


async def test_a_restart_comes_once_when_all_agents_have_taken_half_of_their_turns(server: Server):
    seen: list[int] = []

    async def restart() -> None:
        seen.append(len(server.asked) - 1)

    found = await sessions(3, restart=restart)
    assert seen == [6]
    assert [len(each) for each in found] == [4, 4, 4]


def turn(prompt: int, cached: int, first: float = 1.0) -> Reply:
    return Reply(0.0, [first, 9.0], prompt_tokens=prompt, cached_tokens=cached, ended=9.0)


def test_what_is_computed_again_is_a_share_of_what_was_sent_before():
    session = [turn(100, 0), turn(150, 90), turn(300, 0), turn(350, 300, 3.0)]
    found = agents.figures([session], restarted=False)
    assert found["computed_again"] == pytest.approx((10 + 150) / 550, abs=1e-4)
    assert [one["new"] for one in found["turns"]] == [100, 60, 300, 50]
    assert found["turns"][3]["ttft_ms"]["p50"] == 3000.0


def test_the_first_turn_after_a_restart_counts_by_itself():
    session = [turn(100, 0), turn(150, 90), turn(300, 0), turn(350, 300)]
    found = agents.figures([session], restarted=True)
    assert found["computed_again"] == pytest.approx(10 / 400)
    assert found["after_restart"] == 1.0
