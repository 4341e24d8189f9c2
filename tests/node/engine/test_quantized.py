"""The batch of quantized caches against one of mlx-lm's own quantized caches for every row."""

from __future__ import annotations

import copy
import random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import QuantizedKVCache

from sealring.mesh.errors import ModelError
from sealring.node.engine import caches
from sealring.node.engine.caches.quantized import QuantizedBatchCache, QuantizedRowCache
from sealring.node.engine.staging import random_model, random_stage
from sealring.node.engine.staging.quantization import CacheQuantization, cache_quantization

HEADS, WIDTH = 2, 64


class Mirrored:
    """A batch, and what each of its rows should hold."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.batch: Any = None
        self.rows: list[QuantizedKVCache] = []
        self.key = mx.random.key(bits)

    def random(self, rows: int, tokens: int) -> tuple[mx.array, mx.array]:
        self.key, one, two = mx.random.split(self.key, 3)
        shape = (rows, HEADS, tokens, WIDTH)
        return mx.random.normal(shape, key=one), mx.random.normal(shape, key=two)

    def join(self, lengths: list[int]) -> None:
        arriving = []
        for length in lengths:
            mine, theirs = QuantizedRowCache(64, self.bits), QuantizedKVCache(64, self.bits)
            for cache in (mine, theirs) if length else ():
                key = mx.random.key(length)
                values = mx.random.normal((1, HEADS, length, WIDTH), key=key)
                cache.update_and_fetch(values, 2 * values)
            arriving.append(mine)
            self.rows.append(theirs)
        if self.batch is None:
            self.batch = QuantizedBatchCache.merge(arriving)
        else:
            self.batch.recompose(range(len(self.rows) - len(arriving)), arriving)

    def step(self, tokens: int) -> None:
        keys, values = self.random(len(self.rows), tokens)
        held = self.batch.update_and_fetch(keys, values)
        alone = [
            row.update_and_fetch(keys[place : place + 1], values[place : place + 1])
            for place, row in enumerate(self.rows)
        ]
        for place, expected in enumerate(alone):
            for mine, theirs in zip((*held[0], *held[1]), (*expected[0], *expected[1]), strict=True):
                assert mx.array_equal(mine[place, :, -theirs.shape[2] :], theirs[0])

    def filter(self, keep: list[int]) -> None:
        self.batch.recompose(keep, [])
        self.rows = [self.rows[index] for index in keep]

    def check(self) -> None:
        longest = max(row.offset for row in self.rows)
        assert self.batch.size() == longest
        assert self.batch.offset.tolist() == [row.offset for row in self.rows]
        assert self.batch.left_padding.tolist() == [longest - row.offset for row in self.rows]
        mask = self.batch.make_mask(1)
        assert mask.shape == (len(self.rows), 1, 1, longest + 1)
        assert mask.sum(axis=-1).flatten().tolist() == [row.offset + 1 for row in self.rows]
        for place, row in enumerate(self.rows):
            found = self.batch.extract(place)
            assert (found.offset, found.bits, found.group_size) == (row.offset, self.bits, 64)
            if row.offset:
                for mine, theirs in zip(found.keys_and_values(), row.keys_and_values(), strict=True):
                    for one, two in zip(mine, theirs, strict=True):
                        assert mx.array_equal(one, two)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(choices=st.randoms(use_true_random=False), bits=st.sampled_from([8, 4]))
def test_rows_that_come_and_go_hold_what_they_hold_alone(choices: random.Random, bits: int) -> None:
    run = Mirrored(bits)
    run.join([choices.choice([0, 1, 5, 255, 256, 300]) for _ in range(choices.randint(1, 4))])
    for _ in range(choices.randint(1, 7)):
        action = choices.choice(["join", "step", "step", "filter", "trim"])
        if action == "join":
            run.join([choices.choice([0, 3, 256, 400]) for _ in range(choices.randint(1, 2))])
        elif action == "step":
            run.step(choices.choice([1, 1, 2, 257]))
        elif action == "filter":
            keep = choices.sample(range(len(run.rows)), choices.randint(1, len(run.rows)))
            run.filter(sorted(keep))
        elif run.rows and (shortest := min(row.offset for row in run.rows)):
            count = choices.randint(1, shortest)
            assert run.batch.trim(count) == count
            for row in run.rows:
                row.trim(count)
            if run.batch.size() == 0:
                continue
        run.check()


def test_an_empty_batch_takes_rows_that_hold_something() -> None:
    run = Mirrored(8)
    run.join([0, 0])
    run.join([7, 0, 2])
    run.check()
    run.step(3)
    run.check()


def test_a_copy_goes_its_own_way() -> None:
    run = Mirrored(4)
    run.join([5, 9])
    other = copy.deepcopy(run.batch)
    run.step(1)
    run.check()
    assert other.size() == 9
    row = other.extract(1)
    assert row.offset == 9
    assert row.is_trimmable()


def config(family: str, archs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = archs[family] | fields
    return found


def test_only_plain_caches_are_quantized(archs: dict[str, Any]) -> None:
    stage = random_stage(config("gemma3_text", archs, vocab_size=99), 3, 9, seed=1, kv_bits=8)
    kinds = [type(cache).__name__ for cache in stage.make_cache()]
    assert kinds == ["RotatingKVCache"] * 2 + ["QuantizedRowCache"] + ["RotatingKVCache"] * 3


def test_stand_ins_for_absent_layers_stay_plain(archs: dict[str, Any]) -> None:
    stage = random_stage(config("gemma3_text", archs, vocab_size=99), 0, 3, seed=1, kv_bits=8)
    cache = stage.make_cache()
    assert [type(one).__name__ for one in cache] == ["RotatingKVCache"] * 3 + ["KVCache"]
    mx.eval(stage([mx.zeros((1, 4), mx.uint32)], cache))
    assert cache[-1].offset == 4


def test_group_sizes_follow_the_width(archs: dict[str, Any]) -> None:
    for width, size in ((32, 32), (64, 64), (96, 32), (128, 64)):
        model = random_model(config("qwen3", archs, head_dim=width, vocab_size=99), seed=1)
        assert cache_quantization(model, "qwen3", 4) == CacheQuantization(4, size)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("mixtral", {}, "8 wide"),
        ("gpt_oss", {}, "its attention does not take"),
        ("deepseek_v3", {"kv_lora_rank": 64}, "its attention does not take"),
        ("mamba", {}, "plain KV cache"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    archs: dict[str, Any], family: str, fields: dict[str, Any], why: str
) -> None:
    model = random_model(archs[family] | fields, seed=1)
    with pytest.raises(ModelError) as caught:
        cache_quantization(model, family, 8)
    assert caught.value.reason == "KV_BITS_UNSUPPORTED"
    assert why in caught.value.message
    assert caught.value.hint


def test_lists_of_caches_are_quantized_with_rows_together(archs: dict[str, Any]) -> None:
    """Baichuan M1 has a short convolution's state beside the keys and values of each layer."""
    stage = random_stage(config("baichuan_m1", archs, vocab_size=99), 1, 2, seed=1, kv_bits=8)
    state = mx.random.normal((1, 6, 128), key=mx.random.key(1))
    rows = []
    for length in (3, 6, 2):
        rows.append(stage.make_cache())
        mx.eval(stage([state[:, :length]], rows[-1]))
    alone = [stage([state[:, :1]], copy.deepcopy(rows[number]))[0] for number in (2, 1)]
    batch = caches.recompose(caches.merge(rows[:2]), [1], [rows[2]])
    batch = caches.recompose(batch, [1, 0], [])
    assert "QuantizedBatchCache" in [type(part).__name__ for part in batch[0].caches]
    assert [caches.extract(batch, row)[0].caches[1].offset for row in range(2)] == [2, 6]
    (together,) = stage([mx.repeat(state[:, :1], 2, axis=0)], batch)
    assert mx.allclose(together, mx.concatenate(alone), atol=1e-4)


def test_a_kept_prefix_of_a_quantized_row_goes_on_as_the_row_did(archs: dict[str, Any]) -> None:
    stage = random_stage(config("qwen3", archs, vocab_size=99), 0, 4, seed=1, kv_bits=8)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]], mx.uint32)
    row = stage.make_cache()
    whole = stage([tokens[:, :5]], row)[0]
    rest = stage([tokens[:, 5:]], row)[0]
    kept = caches.detached(caches.first_tokens(row, 5))
    assert caches.trimmable(stage.make_cache())
    assert [one.offset for one in kept] == [5] * 4
    assert mx.array_equal(stage([tokens[:, 5:]], kept)[0], rest)
    assert whole.shape[1] == 5
