"""Folders of small models that see: configurations, processors' settings and chat templates as model makers
publish them, with towers of a few layers. Their tokenizers know single bytes and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

GEMMA3_TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}@IMAGE@"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SCALED = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True}
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]


class Family:
    """What a family's folder holds beside the model's configuration."""

    def __init__(
        self,
        special: list[str],
        row: str,
        image: str,
        config: dict[str, Any],
        preprocessor: dict[str, Any] | None = None,
        processor: dict[str, Any] | None = None,
        tokens: dict[str, str] | None = None,
        row_name: str = "image_token_id",
        template: str = CHATML_TEMPLATE,
        first: int = 0,
    ) -> None:
        self.special, self.row, self.image = special, row, image
        """The special tokens, the one for each row, and what the template writes for an image."""
        self.config, self.preprocessor, self.processor = config, preprocessor or {}, processor or {}
        self.tokens, self.row_name = tokens or {}, row_name
        self.template = template
        self.first = first
        """The number of the first special token. Processors of some families know the numbers of theirs."""

    @property
    def numbers(self) -> dict[int, str]:
        """The special tokens by their numbers."""
        return dict(enumerate(self.special, self.first))

    @property
    def row_number(self) -> int:
        """The number of the token that stands for a row."""
        return self.first + self.special.index(self.row)


FAMILIES = {
    "gemma3": Family(
        [
            "<pad>",
            "<eos>",
            "<bos>",
            "<start_of_turn>",
            "<end_of_turn>",
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
        ],
        "<image_soft_token>",
        "<start_of_image>",
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 16,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 14,
                "image_size": 112,
            },
        },
        {
            **_HALVES,
            **_SCALED,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 112, "width": 112},
            "resample": 2,
            "image_seq_length": 16,
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        "image_token_index",
        GEMMA3_TEMPLATE,
    ),
    "mistral3": Family(
        ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "[IMG]",
        "[IMG]",
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        {
            **_CLIP,
            **_SCALED,
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 14, "width": 14},
            "size": {"longest_edge": 1540},
        },
        {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
        },
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "image_token_index",
    ),
    "pixtral": Family(
        ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "[IMG]",
        "[IMG]",
        {"model_type": "pixtral", "vision_config": {"model_type": "pixtral", "patch_size": 16}},
        {
            **_CLIP,
            **_SCALED,
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 16, "width": 16},
            "size": {"longest_edge": 1024},
        },
        {"processor_class": "PixtralProcessor", "patch_size": 16, "image_token": "[IMG]"},
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "image_token_index",
    ),
    "kimi_vl": Family(
        [
            "[BOS]",
            "[EOS]",
            "<|im_start|>",
            "<|im_end|>",
            "<|im_assistant|>",
            "<|media_start|>",
            "<|media_content|>",
            "<|media_end|>",
            "<|media_pad|>",
        ],
        "<|media_pad|>",
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        {"model_type": "kimi_vl", "vision_config": {"model_type": "moonvit", "patch_size": 14}},
        {**_HALVES, "image_processor_type": "KimiVLImageProcessor", "patch_size": 14, "in_token_limit": 4096},
        None,
        {"bos_token": "[BOS]", "eos_token": "[EOS]"},
        "media_placeholder_token_id",
    ),
    "llama4": Family(
        [
            "<|begin_of_text|>",
            "<|eot|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ],
        "<|patch|>",
        "<|image|>",
        {"model_type": "llama4", "vision_config": {"model_type": "llama4_vision_model"}},
        {
            **_HALVES,
            "image_processor_type": "Llama4ImageProcessorFast",
            "size": {"height": 336, "width": 336},
        },
        {"processor_class": "Llama4Processor", "patch_size": 14},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"},
        "image_token_index",
    ),
    "gemma4": Family(
        [
            "<pad>",
            "<eos>",
            "<bos>",
            "<|im_start|>",
            "<|im_end|>",
            "<|image>",
            "<image|>",
            "<|image|>",
            "<|video|>",
        ],
        "<|image|>",
        "\n\n<|image|>\n\n",
        {"model_type": "gemma4", "vision_config": {"model_type": "gemma4_vision"}},
        None,
        {
            "processor_class": "Gemma4Processor",
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 16,
                "max_soft_tokens": 70,
                "pooling_kernel_size": 3,
            },
        },
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
        },
    ),
    "gemma3n": Family(
        [
            "<pad>",
            "<eos>",
            "<bos>",
            "<|im_start|>",
            "<|im_end|>",
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
            "<start_of_audio>",
            "<end_of_audio>",
            "<audio_soft_token>",
        ],
        "<image_soft_token>",
        "<image_soft_token>",
        {
            "model_type": "gemma3n",
            "vision_config": {"model_type": "gemma3n_vision", "vocab_offset": 6, "vocab_size": 2},
        },
        {
            **_HALVES,
            **_SCALED,
            "do_normalize": False,
            "image_processor_type": "SiglipImageProcessorFast",
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
            "processor_class": "Gemma3nProcessor",
            "image_seq_length": 16,
            "size": {"height": 64, "width": 64},
            "resample": 2,
        },
        {"processor_class": "Gemma3nProcessor", "image_seq_length": 16},
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
    ),
}


def _qwen(model_type: str, patch: int, mean: dict[str, Any], frames: int = 2) -> Family:
    pads = ["<|image_pad|>", "<|video_pad|>"]
    return Family(
        [*_QWEN, *pads],
        pads[0],
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"model_type": model_type, "vision_config": {"model_type": model_type, "patch_size": patch}},
        {
            **mean,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "patch_size": patch,
            "temporal_patch_size": frames,
            "merge_size": 2,
            "min_pixels": 3136,
            "max_pixels": 12845056,
        },
        None,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


_KIMI, _GEMMA4 = FAMILIES["kimi_vl"], FAMILIES["gemma4"]
FAMILIES |= {
    "kimi_k25": Family(
        _KIMI.special,
        _KIMI.row,
        _KIMI.image,
        {"model_type": "kimi_k25", "vision_config": {"model_type": "moonvit", "patch_size": 14}},
        {"media_proc_cfg": {**_HALVES, "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 4096}},
        None,
        _KIMI.tokens,
        "media_placeholder_token_id",
    ),
    "kimi_k3": Family(
        [
            "[BOS]",
            "[EOS]",
            "<|im_start|>",
            "<|im_end|>",
            "<|media_begin|>",
            "<|media_content|>",
            "<|media_end|>",
            "<|media_pad|>",
        ],
        "<|media_pad|>",
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        {"model_type": "kimi_k3", "vision_config": {"model_type": "moonvit3d", "patch_size": 14}},
        {"media_proc_cfg": {**_HALVES, "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 4096}},
        None,
        _KIMI.tokens,
        "media_placeholder_token_id",
    ),
    "gemma4_unified": Family(
        _GEMMA4.special,
        _GEMMA4.row,
        _GEMMA4.image,
        {"model_type": "gemma4_unified", "vision_config": {"model_type": "gemma4_unified_vision"}},
        None,
        {
            "processor_class": "Gemma4UnifiedProcessor",
            "image_processor": {
                "image_processor_type": "Gemma4UnifiedImageProcessor",
                "patch_size": 16,
                "max_soft_tokens": 70,
                "pooling_kernel_size": 3,
            },
        },
        _GEMMA4.tokens,
    ),
    "llava": Family(
        ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>"],
        "<image>",
        "<image>",
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        {
            **_CLIP,
            **_SCALED,
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 112},
            "crop_size": {"height": 112, "width": 112},
            "do_center_crop": True,
            "resample": 3,
        },
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "image_token_index",
    ),
    "minimax_m3_vl": Family(
        [
            "<pad>",
            "<eos>",
            "<|im_start|>",
            "<|im_end|>",
            "]<]start of image[>[",
            "]<]end of image[>[",
            "]<]image[>[",
            "]<]video[>[",
        ],
        "]<]image[>[",
        "]<]image[>[",
        {
            "model_type": "minimax_m3_vl",
            "vision_config": {"model_type": "clip_vision_model", "patch_size": 14},
        },
        {**_CLIP, **_SCALED, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        None,
        {"eos_token": "<eos>", "pad_token": "<pad>"},
        "image_token_index",
    ),
    "muse_glimmer": Family(
        [
            "<pad>",
            "<eos>",
            "<|im_start|>",
            "<|im_end|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|video|>",
        ],
        "<|patch|>",
        "<|patch|>",
        {"model_type": "muse_glimmer", "vision_config": {"model_type": "muse_glimmer_vision"}},
        None,
        {"image_processor": {**_HALVES, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}},
        {"eos_token": "<eos>", "pad_token": "<pad>"},
    ),
    "prism_hadamard_qwen35": _qwen("prism_hadamard_qwen35", 16, _HALVES),
    "qwen2_vl": _qwen("qwen2_vl", 14, _CLIP),
    "qwen2_5_vl": _qwen("qwen2_5_vl", 14, _CLIP),
    "qwen3_vl": _qwen("qwen3_vl", 16, _HALVES),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", 16, _HALVES),
    "qwen3_5": _qwen("qwen3_5", 16, _HALVES),
    "lfm2-vl": Family(
        [
            "<|pad|>",
            "<|startoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
        ]
        + [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)],
        "<image>",
        "<image>",
        {"model_type": "lfm2-vl", "vision_config": {"model_type": "siglip2_vision_model"}},
        {
            **_HALVES,
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "patch_size": 16,
            "downsample_factor": 2,
        },
        {"processor_class": "Lfm2VlProcessor"},
        {
            "bos_token": "<|startoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    ),
}


def _split(model_type: str, kind: str) -> Family:
    """SmolVLM and Idefics 3 divide an image into squares."""
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return Family(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<fake_token_around_image>",
            "<global-img>",
            "<image>",
            "<end_of_utterance>",
            *rows,
        ],
        "<image>",
        "<image>",
        {"model_type": model_type, "vision_config": {"model_type": model_type}},
        {
            **_HALVES,
            **_SCALED,
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_pad": True,
            "image_processor_type": f"{kind}ImageProcessor",
            "max_image_size": {"longest_edge": 64},
            "size": {"longest_edge": 128},
            "resample": 1,
        },
        {"processor_class": f"{kind}Processor", "image_seq_len": 4},
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


FAMILIES |= {
    "idefics3": _split("idefics3", "Idefics3"),
    "smolvlm": _split("smolvlm", "SmolVLM"),
    "internvl_chat": Family(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"],
        "<IMG_CONTEXT>",
        "<image>",
        {
            "model_type": "internvl_chat",
            "vision_config": {"model_type": "intern_vit_6b", "patch_size": 14, "image_size": 112},
            "force_image_size": 112,
            "downsample_ratio": 0.5,
        },
        None,
        None,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "image_token_index",
    ),
}


def _glm(model_type: str) -> Family:
    """GLM-4.1V and others: patches as Qwen's, other tokens."""
    return Family(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|image|>",
            "<|video|>",
        ],
        "<|image|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
        {"model_type": model_type, "vision_config": {"model_type": model_type, "patch_size": 14}},
        {
            **_CLIP,
            **_SCALED,
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        },
        None,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


FAMILIES |= {name: _glm(name) for name in ("glm4v", "glm4v_moe", "glm_ocr")}
FAMILIES |= {
    "aya_vision": Family(
        [
            "<PAD>",
            "<EOS>",
            "<|im_start|>",
            "<|im_end|>",
            "<image>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_PATCH|>",
            "<|IMG_LINE_BREAK|>",
            "TILE",
            "TILE_GLOBAL",
            *(f"TILE_{number}" for number in range(1, 13)),
        ],
        "<|IMG_PATCH|>",
        "<image>",
        {
            "model_type": "aya_vision",
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        },
        {
            **_HALVES,
            **_SCALED,
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            "size": {"height": 112, "width": 112},
        },
        {
            "processor_class": "AyaVisionProcessor",
            "patch_size": 14,
            "img_size": 112,
            "downsample_factor": 2,
        },
        {"eos_token": "<EOS>", "pad_token": "<PAD>"},
        "image_token_index",
    ),
    "dots_ocr": Family(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|img|>",
            "<|imgpad|>",
            "<|endofimg|>",
            "<|video_pad|>",
        ],
        "<|imgpad|>",
        "<|img|><|imgpad|><|endofimg|>",
        {"model_type": "dots_ocr", "vision_config": {"model_type": "dots_vit", "patch_size": 14}},
        {
            **_CLIP,
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "min_pixels": 3136,
            "max_pixels": 11289600,
        },
        None,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        first=151661,
    ),
    "idefics2": Family(
        [
            "<unk>",
            "<s>",
            "</s>",
            "<|im_start|>",
            "<|im_end|>",
            "<fake_token_around_image>",
            "<image>",
            "<end_of_utterance>",
        ],
        "<image>",
        "<image>",
        {"model_type": "idefics2", "vision_config": {"model_type": "idefics2"}},
        {
            **_HALVES,
            **_SCALED,
            "do_convert_rgb": True,
            "do_image_splitting": False,
            "do_pad": True,
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"longest_edge": 224, "shortest_edge": 112},
            "resample": 2,
        },
        {"processor_class": "Idefics2Processor", "image_seq_len": 4},
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "internvl": Family(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"],
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        {
            "model_type": "internvl",
            "vision_config": {
                "model_type": "internvl_vision",
                "patch_size": [14, 14],
                "image_size": [112, 112],
            },
            "downsample_ratio": 0.5,
        },
        None,
        {"processor_class": "InternVLProcessor", "image_seq_length": 16},
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "llava_onevision": Family(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"],
        "<image>",
        "<image>",
        {
            "model_type": "llava_onevision",
            "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": [[112, 112], [112, 224], [224, 112], [224, 224]],
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
        },
        {
            **_HALVES,
            **_SCALED,
            "do_convert_rgb": True,
            "do_pad": True,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": [[112, 112], [112, 224], [224, 112], [224, 224]],
            "size": {"height": 112, "width": 112},
            "resample": 3,
        },
        {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 64,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "image_token_index",
    ),
    "mage_vl": _qwen("mage_vl", 16, _CLIP, 1),
    "mimo_v2": _qwen("mimo_v2", 16, _CLIP),
    "nemotron_h_nano_omni": Family(
        [
            "<unk>",
            "<s>",
            "</s>",
            "<|im_start|>",
            "<|im_end|>",
            "<image>",
            "<img>",
            "</img>",
            "<video>",
            "<so_embedding>",
        ],
        "<image>",
        "<image>",
        {
            "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
            "downsample_ratio": 0.5,
            "vision_config": {"model_type": "radio", "patch_size": 16},
        },
        {
            "norm_mean": _CLIP["image_mean"],
            "norm_std": _CLIP["image_std"],
            "patch_size": 16,
            "downsample_ratio": 0.5,
            "min_num_patches": 16,
            "max_num_patches": 256,
        },
        None,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "img_context_token_id",
    ),
    "paddleocr_vl": Family(
        [
            "<unk>",
            "<s>",
            "</s>",
            "<|im_start|>",
            "<|im_end|>",
            "<|IMAGE_START|>",
            "<|IMAGE_END|>",
            "<|IMAGE_PLACEHOLDER|>",
        ],
        "<|IMAGE_PLACEHOLDER|>",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {"model_type": "paddleocr_vl", "vision_config": {"model_type": "paddleocr_vl", "patch_size": 14}},
        {
            **_HALVES,
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "min_pixels": 12544,
            "max_pixels": 2822400,
        },
        None,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "qwen3_omni_moe": Family(
        [
            *_QWEN,
            "<|image_pad|>",
            "<|video_pad|>",
            "<|audio_start|>",
            "<|audio_end|>",
            "<|audio_pad|>",
        ],
        "<|image_pad|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"model_type": "qwen3_omni_moe"},
        {
            **_HALVES,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3OmniMoeProcessor",
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 3136,
            "max_pixels": 12845056,
        },
        None,
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    ),
    "step3p7": Family(
        [
            "<pad>",
            "<eos>",
            "<|im_start|>",
            "<|im_end|>",
            "<im_start>",
            "<im_end>",
            "<im_patch>",
            "<patch_start>",
            "<patch_end>",
            "<patch_newline>",
        ],
        "<im_patch>",
        "<im_patch>",
        {"model_type": "step3p7", "vision_config": {"model_type": "perception_encoder"}},
        None,
        None,
        {"eos_token": "<eos>", "pad_token": "<pad>"},
    ),
}


def tokenizer(special: list[str], first: int = 0) -> Tokenizer:
    """Special tokens from the number `first` on, then single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({name: number for number, name in enumerate([*special, *letters], first)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return made


def write_folder(path: Path, name: str, config: dict[str, Any] | None = None) -> Path:
    """The folder of a family, with `config` more of its configuration, and without weights."""
    family = FAMILIES[name]
    path.mkdir(parents=True, exist_ok=True)
    tokenizer(family.special, family.first).save(str(path / "tokenizer.json"))
    row = {family.row_name: family.row_number}
    files = {
        "config.json": {**family.config, **row, **(config or {})},
        "preprocessor_config.json": family.preprocessor,
        "processor_config.json": family.processor,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **family.tokens},
    }
    for file, content in files.items():
        if content:
            (path / file).write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(family.template.replace("@IMAGE@", family.image))
    return path


def write_model(path: Path, seed: int = 3) -> Path:
    """A Gemma 3 of random weights in float32, with a tower."""
    from sealring.node.engine import random_whole, save

    found = json.loads((Path(__file__).parents[1] / "data" / "archs-images.json").read_bytes())
    config = found["gemma3"]["config"]
    family = FAMILIES["gemma3"]
    words = len(family.special) + 256
    config |= family.config | {"vocab_size": words, "eos_token_id": [1, 4], "hidden_size": 128}
    config["text_config"] |= {"vocab_size": words, "mm_tokens_per_image": 16, "max_position_embeddings": 4096}
    config["image_token_index"] = family.special.index(family.row)
    write_folder(path, "gemma3", config)
    save(random_whole(config, seed), config, path, {})
    return path


REFERENCE = """
import io, json, sys
import mlx.core as mx
import numpy as np
from PIL import Image
from sealring.node.engine.vision import mlx_vlm_import
from sealring.node.engine import random_whole
folder, seed, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = json.load(open(folder + "/config.json"))
model = random_whole(config, seed)
from transformers import AutoProcessor, AutoTokenizer
processor, tokenizer = AutoProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = open(folder + "/chat_template.jinja").read()
for line in sys.stdin:
    asked = json.loads(line)
    images = [Image.open(file).convert("RGB") for file in asked["files"]]
    text = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, tokenize=False)
    made = dict(processor(images=images or None, text=[text], add_special_tokens=False))
    ids, pixels = mx.array(made["input_ids"]), made.get("pixel_values")
    features = model.get_input_embeddings(ids, pixels, mask=mx.ones(ids.shape, mx.int32))
    others = {name: value for name, value in features.to_dict().items() if value is not None}
    embeddings = others.pop("inputs_embeds")
    cache = model.language_model.make_cache()
    out = model.language_model(inputs=ids, inputs_embeds=embeddings, cache=cache, **others)
    said = []
    while len(said) < most:
        said.append(mx.argmax(out.logits[0, -1]).item())
        if said[-1] in config["eos_token_id"]:
            break
        out = model.language_model(inputs=mx.array([[said[-1]]]), cache=cache)
    print(json.dumps({"prompt": ids.shape[1], "tokens": said}), flush=True)
"""
"""mlx-vlm's whole model, greedy, with its own processor and transformers' rendering of the chat."""
