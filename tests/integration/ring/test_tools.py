"""The makers' own clients call a tool, tell its result and go on, with a real ring in clear or sealed."""

import asyncio

from ringtest import CLUSTER
from weather import BY_HTTP, GET, QUESTION, client_of, over_grpc, with_the_library

pytestmark = CLUSTER


async def test_a_custom_tools_input_keeps_to_its_grammar(ring, sealed):
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: CITY "!"\nCITY: /[A-Z][a-z]{4}/'}
    asked = {"model": "demo", "temperature": 0, "tools": [{"type": "custom", **GET, "format": form}]}

    async def called(url):
        async with client_of(url) as client:
            (call,) = (await client.responses.create(input=[QUESTION], **asked)).output
        return (call.type, call.name, call.input)

    calls = await asyncio.gather(called(ring.cluster.http_url), called(sealed))
    assert calls == [("custom_tool_call", "get_weather", "Paris!")] * 2


async def test_a_tool_is_called_and_its_result_told(ring, sealed):
    """In all APIs at once, because rows of one batch take hardly more than one row."""
    clear = ring.cluster.http_url
    by_http = zip(BY_HTTP.values(), (clear, sealed, sealed, clear), strict=True)
    asked = [converse(url, "demo", None) for converse, url in by_http]
    answers = await asyncio.gather(*asked, over_grpc(ring), with_the_library(ring))
    assert answers == ["It is 21 degrees and sunny in Paris."] * 6
