"""`sealring usage`: added up by key, model and day, as a table, JSON and CSV."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sealring.testing import ScriptedGateway
from sealring.v1 import inference_pb2 as inference

ROWS = [
    ("2026-11-30", "abc", "qwen", 3, 900, 400, 60, 1500),
    ("2026-11-30", "", "qwen", 1, 10, 0, 5, 100),
    ("2026-11-29", "abc", "qwen", 1, 100, 0, 40, 400),
    ("2026-11-29", "abc", "=llama", 1, 50, 0, 7, 250),
]


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with ScriptedGateway() as made:
        fields = inference.Usage.DESCRIPTOR.fields
        made.usage = inference.GetUsageResponse(
            usage=[
                inference.Usage(**{one.name: value for one, value in zip(fields, row, strict=True)})
                for row in ROWS
            ],
            keys=[inference.KeyUsage(key="abc", label="laptop", tokens_a_day=1000, tokens_today=560)],
        )
        yield made


async def run(here: Any, *arguments: str, **environment: str) -> Any:
    return await asyncio.to_thread(here, "usage", *arguments, **environment)


async def test_a_table_by_key_and_model(here: Any, gateway: ScriptedGateway) -> None:
    done = await run(here, "--gateway", gateway.address)
    assert done.status == 0, done.err
    head, first, second, third, quota = done.out.splitlines()
    assert head.split() == ["key", "model", "requests", "prompt", "cached", "answered", "ring", "seconds"]
    assert first.split() == ["laptop", "qwen", "4", "1000", "400", "100", "1.90"]
    assert second.split() == ["laptop", "=llama", "1", "50", "0", "7", "0.25"]
    assert third.split() == ["no", "key", "qwen", "1", "10", "0", "5", "0.10"]
    assert quota == "laptop has used 560 of its 1,000 tokens of today"


async def test_json_and_csv_by_day(here: Any, gateway: ScriptedGateway) -> None:
    at = ("--gateway", gateway.address, "--by", "day")
    rows = (await run(here, *at, "--json")).data
    assert [(one["day"], one["answered_tokens"]) for one in rows] == [("2026-11-30", 65), ("2026-11-29", 47)]
    lines = (await run(here, *at, "--by", "key", "--csv")).out.splitlines()
    read = list(csv.DictReader(lines))
    assert [(one["day"], one["key"], one["label"], one["ring_ms"]) for one in read] == [
        ("2026-11-30", "abc", "laptop", "1500"),
        ("2026-11-30", "", "", "100"),
        ("2026-11-29", "abc", "laptop", "650"),
    ]
    lines = (await run(here, "--gateway", gateway.address, "--by", "model", "--csv")).out.splitlines()
    assert [one["model"] for one in csv.DictReader(lines)] == ["qwen", "'=llama"], "no formula"
    assert (await run(here, *at, "--json", "--csv")).status != 0


async def test_several_gateways_are_added_up_as_far_as_they_answer(
    here: Any, gateway: ScriptedGateway
) -> None:
    async with ScriptedGateway() as other:
        other.usage = gateway.usage
        both = f"{gateway.address},{other.address}"
        rows = (await run(here, "--json", "--by", "model", SEALRING_CLI_GATEWAY=both)).data
    assert rows[0]["requests"] == 10


async def test_nothing_and_nobody(here: Any) -> None:
    async with ScriptedGateway() as idle:
        assert "nothing was used" in (await run(here, "--gateway", idle.address)).out
        address = idle.address
    done = await run(here, "--gateway", address)
    assert done.status != 0
    assert "cannot be reached" in done.err
