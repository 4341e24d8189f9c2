"""Generated models load in mlx-lm and never end an answer early."""

import importlib

from bench.models import SHAPES, Shape, made_once, random_model, stretched_demo


def test_a_random_model_is_made_once_and_runs(tmp_path):
    shape = Shape(layers=2, hidden=32, intermediate=64, heads=2, kv_heads=2, context=256)
    folder = random_model(shape, tmp_path)
    assert random_model(shape, tmp_path) == folder
    import mlx.core as mx
    from mlx_lm import load

    model, tokenizer = load(str(folder))
    generate_step = importlib.import_module("mlx_lm.generate").generate_step
    tokens = [int(token) for token, _ in generate_step(mx.array([5, 6, 7]), model, max_tokens=32)]
    assert len(tokens) == 32
    assert tokenizer.eos_token_id not in tokens
    assert tokenizer.decode(tokens).isalnum()


def test_a_pipelined_kind_has_what_the_pipeline_wants(tmp_path):
    shape = Shape("qwen2", layers=2, hidden=32, intermediate=64, heads=2, kv_heads=2)
    folder = random_model(shape, tmp_path)
    assert (folder / "model.safetensors.index.json").is_file()
    assert SHAPES["12x256-qwen2"].kind == "qwen2"


def test_the_demo_model_gets_another_context(tmp_path):
    assert '"max_position_embeddings": 8192' in (stretched_demo(8192, tmp_path) / "config.json").read_text()


def test_a_model_that_another_process_makes_meanwhile_is_taken(tmp_path):
    def fill(work):
        work.mkdir()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    assert (made_once("model", tmp_path, fill) / "theirs").exists()
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
