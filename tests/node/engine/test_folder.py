from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from stagering import config_of

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.mesh.ring import DRAFT_MARKS, DRAFT_ROWS
from sealring.mesh.system.pace import LOADING, WARMING
from sealring.node.engine import digest, folder
from sealring.node.engine.guessing import check_digest
from sealring.node.engine.profile import profile
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine

Write = Callable[..., Path]


def command(path: Path, lo: int, hi: int, **fields: Any) -> engine.LoadStage:
    return engine.LoadStage(id=3, path=str(path), lo=lo, hi=hi, context=64, **fields)


def load(asked: engine.LoadStage) -> folder.Loaded:
    return folder.load(asked, lambda event: None)


def test_a_stage_is_loaded_and_described(llama: dict[str, Any], model_folder: Write) -> None:
    path = model_folder(llama)
    asked = command(path, 1, 5, digest=digest(path))
    loaded = load(asked)
    assert loaded.front is None
    message = loaded.message(9)
    assert message.id == 9
    assert message.weight_bytes == loaded.stage.weight_bytes > 0
    per_layer = 2 * 2 * 8 * 4  # keys and values, heads, width, float32
    assert message.kv_bytes_per_token == 4 * per_layer
    assert message.kv_bytes_per_row == 256 * 4 * per_layer
    assert not loaded.stage.awaits_input
    assert loaded.measured.items() <= profile(path).items()
    assert loaded.serves(command(path, 1, 5, digest=digest(path)))
    assert not loaded.serves(command(path, 0, 5, digest=digest(path)))


def test_layers_that_compute_prompts_alone_are_loaded_beside_and_shared(
    llama: dict[str, Any], model_folder: Write
) -> None:
    path = model_folder(llama)
    both = load(command(path, 1, 4, prompt_lo=2, prompt_hi=5))
    message, held = both.message(1), load(command(path, 1, 5)).message(2)
    assert message.prompts_alone
    assert message.weight_bytes == held.weight_bytes == both.weight_bytes, "each array once"
    assert message.kv_bytes_per_token == held.kv_bytes_per_token
    assert not held.prompts_alone
    assert both.stage.prefill.spec.lo == 2
    assert both.borders.before is not None
    assert both.borders.after is not None
    assert not both.serves(command(path, 1, 4))
    assert both.serves(command(path, 1, 4, prompt_lo=2, prompt_hi=5))


def test_a_load_says_how_far_it_is(
    llama: dict[str, Any], model_folder: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PROGRESS_SECONDS", 0.0)
    events: list[engine.EngineEvent] = []
    path = model_folder(llama)
    folder.load(command(path, 1, 5), events.append)
    told = [event.progress for event in events]
    assert {one.id for one in told} == {3}
    assert [one.what for one in told][-2:] == [LOADING, WARMING]
    assert told[-2].done == told[-2].total > 0 == told[-1].total


def test_a_stage_with_quantized_caches_asks_for_fewer_bytes(
    llama: dict[str, Any], model_folder: Write
) -> None:
    path = model_folder(llama | {"head_dim": 32})
    plain, eight, four = (load(command(path, 1, 5, kv_bits=bits)) for bits in (0, 8, 4))
    per_layer = [2 * 2 * size for size in (32 * 4, 32 + 2 * 4, 16 + 2 * 4)]
    found = [loaded.message(1).kv_bytes_per_token for loaded in (plain, eight, four)]
    assert found == [4 * size for size in per_layer]
    assert not plain.serves(command(path, 1, 5, kv_bits=8))
    assert eight.serves(command(path, 1, 5, kv_bits=8))


def test_caches_that_cannot_be_quantized_are_refused_before_the_load(
    llama: dict[str, Any], model_folder: Write
) -> None:
    with pytest.raises(ModelError) as caught:
        load(command(model_folder(llama), 1, 5, kv_bits=8))
    assert caught.value.reason == "KV_BITS_UNSUPPORTED"
    assert "8 wide" in caught.value.message


def test_a_link_that_is_changed_leads_to_no_other_model(
    llama: dict[str, Any], model_folder: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before its digest is compared, whatever sizes and times say, nor while it is loaded."""
    first, link = model_folder(llama), tmp_path / "link"
    second = Path(shutil.copytree(first, tmp_path / "second"))
    wanted, loaded = digest(first), load(command(first, 1, 5))
    content = bytearray((second / "model.safetensors").read_bytes())
    content[-400:] = bytes(400)
    (second / "model.safetensors").write_bytes(content)
    link.symlink_to(first)

    def swapped(path: Path, *of: Any) -> None:
        check_digest(path, *of)
        link.unlink()
        link.symlink_to(second)

    monkeypatch.setattr(folder, "check_digest", swapped)
    found = load(command(link, 1, 5, digest=wanted))
    assert link.readlink() == second
    assert same_arrays(found, loaded)
    assert not same_arrays(load(command(second, 1, 5)), loaded)
    monkeypatch.undo()
    status = (second / "config.json").stat()
    text = (second / "config.json").read_text().replace("model_type", "model_typE")
    (second / "config.json").write_text(text)
    os.utime(second / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ModelError) as caught:
        load(command(link, 1, 5, digest=wanted))
    assert caught.value.reason == "MODEL_DIGEST_MISMATCH"


def same_arrays(one: folder.Loaded, other: folder.Loaded) -> bool:
    return all(bool(mx.array_equal(a, b)) for a, b in zip(one.stage.kept, other.stage.kept, strict=True))


def test_another_digest_is_refused(llama: dict[str, Any], model_folder: Write) -> None:
    with pytest.raises(ModelError) as caught:
        load(command(model_folder(llama), 1, 5, digest="0" * 64))
    assert caught.value.reason == "MODEL_DIGEST_MISMATCH"


def test_a_head_without_a_tokenizer_is_refused(llama: dict[str, Any], model_folder: Write) -> None:
    with pytest.raises(ModelError) as caught:
        load(command(model_folder(llama), 0, 5))
    assert caught.value.reason == "TOKENIZER_CORRUPT"


def test_an_impossible_range_is_refused(llama: dict[str, Any], model_folder: Write) -> None:
    with pytest.raises(InvalidInput):
        load(command(model_folder(llama), 3, 9))


@pytest.mark.parametrize(
    ("context", "chunk", "expected"),
    [
        (4, 0, (30, 256 * 30 + 7)),
        (100, 0, (10, 2560 + 7 + 20 * 8)),
        (100, 32, (10, 2560 + 7 + 20 * 40)),
        (9, 32, (10, 2560 + 7 + 20 * 9)),
    ],
)
def test_windows_shorter_than_the_context_count_per_row(
    context: int, chunk: int, expected: tuple[int, int]
) -> None:
    measured = {"kv_bytes_per_token": [99, 10, 20], "kv_max_tokens": [5, None, 8], "state_bytes": [99, 7, 0]}
    assert folder.kv_bytes(measured, 1, 3, context, chunk) == expected


def test_a_window_holds_what_is_charged_for_it(llama: dict[str, Any], model_folder: Write) -> None:
    windows = llama | {"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 4]}
    loaded = load(command(model_folder(windows), 1, 5, prefill_chunk=32))
    cache = loaded.stage.make_cache()
    for _ in range(2):
        loaded.stage([mx.zeros((1, 32, 32))], cache)
    held = sum(part.nbytes for part in cache)
    assert folder.kv_bytes(loaded.measured, 1, 5, 64, 0)[1] < held <= loaded.kv_bytes[1]


def test_a_profile_fits_its_message(llama: dict[str, Any], model_folder: Write) -> None:
    path = model_folder(llama)
    with pytest.raises(ModelError) as caught:
        folder.profile_message(str(path))
    assert caught.value.reason == "TOKENIZER_MISSING"
    (path / "tokenizer.json").write_text("{}")
    message = folder.profile_message(str(path))
    assert (message.model_type, message.layers, message.max_context) == ("llama", 5, 512)
    assert list(message.kv_max_tokens) == [0] * 5
    assert message.digest == digest(path)


def test_a_disk_goes_on_in_the_next_epoch_unless_its_key_is_another(
    llama: dict[str, Any], model_folder: Write, tmp_path: Path
) -> None:
    """A disk of its own for each epoch would hold what the last ones have still to write in memory."""
    loaded = load(command(model_folder(llama), 1, 5))

    def opened(key: bytes) -> object:
        disk = engine.PrefixDisk(root=str(tmp_path), model=str(tmp_path / "model"), key=key)
        return loaded.open_disk(disk, print)

    first = opened(bytes(32))
    assert opened(bytes(32)) is first
    assert opened(b"k" * 32) is not first
    assert loaded.open_disk(None, print) is None
    assert opened(b"k" * 32) is not None
    loaded.free()


DEMO = Path(__file__).parents[3] / "examples" / "demo_model" / "model"


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2"])
def test_a_draft_model_may_have_windows_and_states(family: str, model_folder: Write) -> None:
    """Both where it is profiled and where the head loads it, whose memory counts its marks."""
    small = model_folder(config_of(family) | {"vocab_size": 1536})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, small)
    message = folder.draft_message(str(DEMO), str(small))
    layers = zip(message.kv_bytes_per_token, message.kv_max_tokens, message.state_bytes, strict=True)
    mark = sum(state + growth * window for growth, window, state in layers)
    assert mark > 0
    draft = engine.DraftModel(path=str(small), digest=message.digest, context=64)
    loaded = load(command(DEMO, 0, 4, draft=draft))
    assert loaded.sources.memory > sum(message.layer_bytes) + DRAFT_MARKS * mark
    lookup, told = loaded.message(1).sources
    assert lookup == control.DraftFacts(source=control.DRAFT_SOURCE_LOOKUP)
    assert (told.source, told.rows, told.ahead) == (control.DRAFT_SOURCE_MODEL, DRAFT_ROWS, False)
    assert min(told.microseconds, told.rows_microseconds) > 0
    loaded.free()


def test_a_stage_whose_layers_use_the_caches_of_others_has_no_marks() -> None:
    """Nothing is planned for it, so that a byte for each mark would leave no room for any prefix."""
    measured = {"kv_bytes_per_token": [64, 0, 0], "kv_max_tokens": [8, 0, 0], "state_bytes": [0, 0, 0]}
    assert [folder.mark_bytes(measured, *layers, 512) for layers in ((0, 1), (1, 3))] == [512, 0]
