"""What `sealring connect` writes or prints makes the tools work as it stands, in clear and sealed."""

import asyncio
import os
import sys

import pytest
from agents import INSTALLED
from ringtest import AGENTS, HANG_SECONDS, PROXY_KEY, give_proxy_key

pytestmark = AGENTS
PYTHON = INSTALLED / "bin" / "python"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


async def _run(home, *command, stdin=None):
    """What it prints, with this home folder."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"HOME": str(home), "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"},
    )
    async with asyncio.timeout(HANG_SECONDS):
        printed, errors = await process.communicate((stdin or "").encode())
    assert process.returncode == 0, errors.decode()[-3000:]
    return printed.decode()


async def _connect(home, url, *arguments):
    give_proxy_key(home)
    own = (sys.executable, "-P", "-m", "sealring.cli", "connect", *arguments, "--url", url)
    return await _run(home, *own)


@pytest.fixture(params=["clear", "sealed"])
def url(request, ring, sealed):
    return sealed if request.param == "sealed" else ring.cluster.http_url


async def test_llm_answers_with_what_is_written(url, tmp_path):
    await _connect(tmp_path, url, "llm", "--write")
    await _run(tmp_path, "llm", "keys", "set", "sealring", "--value", PROXY_KEY)
    assert (await _run(tmp_path, "llm", "-m", "sealring", QUESTION)).strip() == ANSWER


@pytest.mark.parametrize("name", ["langchain", "python"])
async def test_a_program_runs_as_it_is_shown(url, tmp_path, name):
    lines = (await _connect(tmp_path, url, name)).replace("Hello!", QUESTION).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("from "))
    end = next(at for at, line in enumerate(lines) if line.startswith("print("))
    program = "\n".join(lines[start : end + 1])
    assert (await _run(tmp_path, str(PYTHON), "-", stdin=program)).strip() == ANSWER


async def test_the_line_for_curl_runs(url, tmp_path):
    printed = (await _connect(tmp_path, url, "curl")).replace("Hello!", QUESTION)
    line = printed[printed.index("echo ") :]
    line = line[: line.index("}'") + 2]
    assert ANSWER in await _run(tmp_path, "sh", "-c", line)
