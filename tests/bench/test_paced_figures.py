"""The time of a named Mac's step, against what was published, and the data file's rows."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from bench.paced.figures import FILE, StageTime, cluster, figures
from sealring.mesh.errors import NotFound

FIGURES = figures()


def rate(machine: str, model: str, bits: float | None = None) -> float:
    found = FIGURES.models[model]
    if bits is not None:
        found = dataclasses.replace(found, bits=bits)
    return 1 / StageTime(FIGURES.machines[machine], found, 1.0, last=True).step(1, 1, 0)


@pytest.mark.parametrize(
    ("machine", "model", "bits", "published", "error"),
    [
        ("m4max", "qwen3-4b-4bit", 16, 52.5, 0.011),
        ("m4max", "qwen3-4b-4bit", 8.5, 86.9, 0.011),
        ("m4max", "qwen3-4b-4bit", 6.5, 104.7, 0.011),
        ("m4max", "qwen3-4b-4bit", 5.5, 116.4, 0.011),
        ("m4max", "qwen3-4b-4bit", 4.5, 134.5, 0.011),
        ("m4max", "qwen3-30b-a3b-4bit", 8.5, 83.2, 0.02),
        ("m4max", "qwen3-30b-a3b-4bit", 6.5, 94.1, 0.02),
        ("m4max", "qwen3-30b-a3b-4bit", 5.5, 101.0, 0.02),
        ("m4max", "qwen3-30b-a3b-4bit", 4.5, 113.3, 0.02),
        ("m4pro", "qwen35-9b-4bit", None, 37.7, 0.03),
        ("m4pro", "qwen38-27b-4bit", None, 12.43, 0.03),
        ("m3ultra", "qwen38-27b-4bit", None, 30.3, 0.03),
        ("m3ultra", "llama-8b-4bit", None, 119.4, 0.03),
        ("m5max", "gpt-oss-120b", None, 89.0, 0.03),
        ("m5ultra", "qwen38-27b-4bit", None, 33.0, 0.03),
    ],
)
def test_one_request_on_one_mac_is_as_published(machine, model, bits, published, error):
    assert rate(machine, model, bits) == pytest.approx(published, rel=error)


@pytest.mark.parametrize(("rows", "tokens_per_second"), [(1, 11.6), (8, 39), (16, 50), (32, 99), (64, 102)])
def test_rows_of_a_4_bit_model_are_a_staircase(rows, tokens_per_second):
    one = StageTime(FIGURES.machines["m4max"], FIGURES.models["llama-70b-4bit"], 1.0, last=True)
    assert rows / one.step(rows, 1, 0) == pytest.approx(tokens_per_second, rel=0.015)


def test_long_chunks_take_as_long_as_their_operations():
    one = StageTime(FIGURES.machines["m5max"], FIGURES.models["qwen38-27b-4bit"], 1.0, last=True)
    assert 4096 / sum(one.step(1, 2048, at) for at in (0, 2048)) == pytest.approx(1006, rel=0.1)


def test_stages_share_a_models_time_and_the_last_one_has_the_output_head():
    machine, model = FIGURES.machines["m4max"], FIGURES.models["llama-70b-4bit"]
    first, last, whole = (
        StageTime(machine, model, share, end).step(4, 1, 1000)
        for share, end in ((0.5, False), (0.5, True), (1.0, True))
    )
    assert first < last
    assert first + last == pytest.approx(whole)


@pytest.mark.parametrize("machine", FIGURES.machines)
@pytest.mark.parametrize("model", FIGURES.models)
def test_steps_take_longer_with_more_context_and_longer_chunks(machine, model):
    one = StageTime(FIGURES.machines[machine], FIGURES.models[model], 0.5, last=True)
    assert one.step(4, 1, 0) < one.step(4, 1, 8192)
    chunks = [one.step(1, tokens, 0) for tokens in (64, 128, 512, 2048, 8192)]
    assert all(shorter < longer for shorter, longer in pairwise(chunks))


def test_experts_of_many_rows_are_read_once_at_most():
    one = StageTime(FIGURES.machines["m4max"], FIGURES.models["qwen3-30b-a3b-4bit"], 1.0, last=True)
    whole_model = 31e9 * 4.5 / 8 / 486e9
    assert one.step(1, 1, 0) < one.step(8, 1, 0) < one.step(32, 1, 0) < 0.02 + 4 * whole_model


def test_every_row_has_a_source_and_a_mark():
    for table in (FIGURES.machines, FIGURES.models, FIGURES.links):
        assert table
    names = {name.partition(".")[0] for name in FIGURES.sources}
    assert names == {"host", "stairs", "ssds", "machines", "models", "links"}
    assert all(text[:3] in ("[S]", "[I]", "[J]") and len(text) > 8 for text in FIGURES.sources.values())


@pytest.mark.parametrize(
    ("words", "instead"),
    [('mark = "S"', 'mark = "?"'), ("source = ", "sauce = "), ("layers = 80", "layer = 80")],
)
def test_a_row_that_is_not_whole_is_refused(tmp_path: Path, words: str, instead: str):
    file = tmp_path / "macs.toml"
    file.write_text(FILE.read_text().replace(words, instead, 1))
    with pytest.raises((ValueError, KeyError, TypeError)):
        figures(file)


def test_published_clusters_are_of_known_machines_and_models():
    for one in FIGURES.published:
        assert len(cluster(one["cluster"])) > 1
        assert one["model"] in FIGURES.models


def test_clusters_are_written_as_numbers_of_macs():
    assert cluster("2xm4max") == ["m4max", "m4max"]
    assert cluster("m3ultra+2xm5max") == ["m3ultra", "m5max", "m5max"]
    for wrong in ("", "0xm4max", "2xm9", "2x", "m4max+"):
        with pytest.raises(NotFound):
            cluster(wrong)
