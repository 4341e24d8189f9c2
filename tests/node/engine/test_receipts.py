"""The tokens that a tail signs: those that count, whatever drafts were wrong and however late they come."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.receipt.digests import AnswerHash, sampled_digest
from sealring.mesh.ring import Eviction, ResolvedStep, Settling
from sealring.node.engine import Delivered, Sampled, bring
from sealring.v1 import inference_pb2 as inference

BINDING = bytes(range(32))
RIGHT, WRONG = 1000, 5
"""Tokens that count are RIGHT and their place."""


def step(*sampled: int, drafts: int = 0) -> ResolvedStep:
    return ResolvedStep(1, b"", (), (), 0, tuple(dict.fromkeys(sampled)), sampled, drafts)


Chain = st.lists(st.integers(1, 4), min_size=1, max_size=3)
"""The drafts of each run in flight; an empty list is a step without drafts."""


@given(
    chains=st.lists(st.tuples(st.just([]) | Chain, st.integers(0, 100), st.integers(0, 3)), max_size=12),
    cut=st.integers(0, 3),
    given_tokens=st.integers(0, 9),
)
def test_the_tail_signs_the_tokens_that_count(
    chains: list[tuple[list[int], int, int]], cut: int, given_tokens: int
) -> None:
    tail, late = Sampled(), deque[tuple[object, list[int]]]()
    tail.begin(7, 2, BINDING, given_tokens)
    settled = 0

    def launch(of: ResolvedStep, tokens: list[int]) -> None:
        late.append((tail.places(of), tokens))

    def arrive(left: int) -> None:
        while len(late) > left:
            places, tokens = late.popleft()
            bring(places, tokens)  # type: ignore[arg-type]

    for drafts, share, left in chains:
        if not drafts:
            launch(step(7, 8), [RIGHT + settled, WRONG])
            settled += 1
            continue
        every = sum(1 + each for each in drafts)
        accepted = 1 + share * (every - 1) // 100
        place = 0
        for run in drafts:
            reached = range(place, place + 1 + run)
            tokens = [RIGHT + settled + at if at < accepted else WRONG for at in reached]
            launch(step(*[7] * (1 + run), drafts=run), tokens)
            place += 1 + run
        arrive(left)  # what is behind a wrong draft may come after it was settled
        tail.change(Settling(7, 0, accepted, every - accepted))
        settled += accepted
    arrive(0)
    tokens = max(0, settled - cut)
    digests = tail.digests(7, given_tokens + tokens)
    truth = [RIGHT + at for at in range(tokens)]
    assert (digests.binding, digests.given) == (BINDING, given_tokens)
    assert digests.sampled == sampled_digest(BINDING, truth)


def test_a_tail_signs_nothing_that_it_has_not_sampled() -> None:
    tail = Sampled()
    assert not tail.places(step(7))
    tail.begin(7, 1, BINDING, 0)
    bring(tail.places(step(7)), [1])
    assert tail.digests(7, 1).sampled
    assert not tail.digests(7, 2).sampled
    assert not tail.digests(8, 1).sampled
    tail.change(Eviction(7, None, 0))
    assert not tail.digests(7, 1).sampled


def test_head_and_tail_have_one_hash_of_the_tokens_of_an_epoch() -> None:
    head, tail = Delivered(BINDING, 4, given=2), Sampled()
    tail.begin(7, 1, BINDING, 2)
    for token in (1, 2, 3, 4):
        head.token(token)
    for token in (3, 4):
        bring(tail.places(step(7)), [token])
    head.add("a", None)
    head.add("b", inference.Parsed(reasoning="r", tool_calls=[inference.ToolCall(name="f", arguments="")]))
    said = head.digests(7, inference.FINISH_REASON_STOP)
    assert said.sampled == tail.digests(7, 4).sampled
    whole = AnswerHash()
    whole.add("a")
    whole.add("b", "r", [inference.ToolCall(id="1", name="f", arguments="{}")])
    assert (said.text, said.reasoning, said.calls, said.order) == tuple(vars(whole.digests()).values())
