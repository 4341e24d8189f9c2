"""A ring of unlike members on one host: one computes on the GPU, if there is any, two on the CPU by setting.

`python tests/support/unlikering.py` compares greedy answers of the demo model with those of mlx_lm on a CPU.
An answer that differs is a near tie if the two likeliest tokens of mlx_lm are less than NEAR apart where it
first differs: devices round in other orders. Any other difference ends with status 1.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

ON_CPU = {"SEALRING_NODE_COMPUTE_ON_CPU": "true"}
NEAR = 0.02
"""In logits: float32 activations over three stages differ by less between devices."""

TOKENS = 48
QUESTIONS = (
    "Name three rivers.",
    "What is seven times eight?",
    "Tell me about gardens in winter.",
    "Why is the sky blue?",
    "Count from one to twenty.",
    "Write a letter to a friend about a bridge over a silver river in the market town. " * 8,
    "What do you know?",
    "Hello!",
)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def answers(folder: Path) -> list[str]:
    """The ring's answers to the questions."""
    import hasty
    from ringtest import HASTY, MODEL, chat, started

    from sealring.cli.local.cluster import LocalCluster

    class Unlike(LocalCluster):
        def _environment(self, name: str) -> dict[str, str]:
            return super()._environment(name) | (ON_CPU if name in self.node_names[1:] else {})

    async with Unlike(folder, MODEL, nodes=3, name="unlike", settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        async with started(cluster, split=[3, 3, 3]) as ring:
            say("serving over", [stage.member_name for stage in ring.deployment.plan.rings[0].stages])
            nodes = (await cluster.admin.call("ListNodes")).nodes
            say("computing on", {node.name: node.heartbeat.computes_on for node in nodes})
            say(*ring.deployment.plan.reasons)
            asked = [await ring.reply(chat(one, temperature=0.0), TOKENS) for one in QUESTIONS]
            return [one.text for one in asked]


def compared(found: list[str]) -> bool:
    """Says how the answers compare with mlx_lm's on the CPU; whether all are equal or near ties."""
    import mlx.core as mx
    from ringtest import MODEL, Reference

    mx.set_default_device(mx.cpu)
    reference, right = Reference(MODEL), True
    for question, text in zip(QUESTIONS, found, strict=True):
        messages = [{"role": "user", "content": question}]
        wanted = reference.reply(messages, TOKENS).text
        if text == wanted:
            say(f"equal: {question[:40]}")
            continue
        tokenizer = reference.tokenizer
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        tokens = tokenizer.encode(wanted, add_special_tokens=False)
        same = next(n for n in range(len(tokens), -1, -1) if text.startswith(tokenizer.decode(tokens[:n])))
        logits = reference.model(mx.array([prompt + tokens[:same]]))[0, -1].astype(mx.float32)
        second, first = (float(one.item()) for one in mx.sort(logits)[-2:])
        near = first - second < NEAR
        right = right and near
        say(f"{'near tie' if near else 'OTHER'} at token {same}, {first - second:.4f} apart: {question[:40]}")
    return right


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        told = asyncio.run(answers(Path(made) / "state"))
    sys.exit(0 if compared(told) else 1)
