"""`sealring chat` before a real ring: sealed, as it is typed on the first machine."""

import asyncio
import json
import sys

from ringtest import CLUSTER, LIMIT_SECONDS

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"


async def chat(ring, folder, *options, stdin=""):
    """Status, standard output and standard error of the command in an empty home folder."""
    command = ("chat", "--gateway", ring.cluster.grpc_address, *options)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sealring.cli", *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"HOME": str(folder), "PATH": ""},
        cwd=folder,
    )
    async with asyncio.timeout(LIMIT_SECONDS):
        shown, said = await process.communicate(stdin.encode())
    return process.returncode, shown.decode(), said.decode()


async def test_a_question_and_a_conversation_are_sealed(ring, reference, tmp_path):
    known = ("--operator", ring.cluster.operator_bundle)
    status, shown, said = await chat(ring, tmp_path, QUESTION, *known, "--json")
    assert status == 0, said
    answer, expected = json.loads(shown), reference.reply([{"role": "user", "content": QUESTION}], 100)
    assert (answer["answer"], answer["sealed"], answer["min_trust"]) == (expected.text, True, "software")
    assert answer["prompt_tokens"] == expected.prompt_tokens

    status, shown, said = await chat(ring, tmp_path, *known, stdin=f"{QUESTION}\nAnd of Italy?\n")
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": expected.text},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert (status, shown) == (0, f"{expected.text}\n{reference.reply(turns, 100).text}\n"), said
