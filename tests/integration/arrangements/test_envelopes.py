"""ML-KEM-768 with X25519, in rosters and envelopes; both halves of the key are needed."""

from forger import QUESTION, Forger
from ringtest import CLUSTER, chat

pytestmark = CLUSTER


async def test_hybrid_sealing_keys_end_to_end(arrangements):
    ring = await arrangements.have(stages=2, max_rows=4)
    clear = await ring.ask(chat(QUESTION), 20)
    async with ring.sealing() as client:
        asked = [{"role": "user", "content": QUESTION}]
        replies = [await client.chat(asked, model=ring.model, max_tokens=20).result() for _ in range(2)]
    assert [one.text for one in replies] == [clear.text] * 2
    forger = await Forger.meet(ring)
    head, tail = forger.keys
    assert {len(head), len(tail)} == {1184 + 32}
    assert await forger.outcome(forger.request()) > 0
    for key in (tail, head[:1184] + tail[1184:], tail[:1184] + head[1184:], head[1184:]):
        assert await forger.outcome(forger.request(key=key)) == "ENVELOPE_REFUSED"
