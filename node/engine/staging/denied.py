"""The model types that mlx-vlm alone has and that are not served, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

_REASONS = {
    "mllama": (
        "where a prompt has no image, mlx-vlm's cross-attention takes halves of its queries for keys and "
        "values"
    ),
    "molmo_point": "it points by heads beside its text model, which choose among an image's patches",
    "cohere_compass": "it embeds and scores: its configuration says how it pools and shifts scores",
    "limite": "each of its layers gets five arrays for each token, some of them of earlier layers",
    "zaya1_vl": "each of its layers hands three arrays on, for which there is no adapter",
    "deepseek_vl_v2 plamo2vl": (
        "mlx-vlm's text model and mlx-lm's differ without images (0.6 and 0.4, of logits of 3.4 and 3.6)"
    ),
    "deepseekocr deepseekocr_2 unlimited_ocr": (
        "their DeepSeek V2 has plain attention, which mlx-lm's has not"
    ),
    "diffusion_gemma falcon_ocr falcon_perception florence2 hrm_text llada2_moe nemotron_labs_diffusion "
    "nemotron_parse paligemma": "their prompts or answers are not computed from left to right",
    "fastvlm llava_bunny multi_modality phi4_siglip": (
        "mlx-vlm puts all rows of an image in the place of one token, so nothing says how many "
        "before the tower has run"
    ),
    "got": "its configuration names no tower",
    "granite_vision llava_next": (
        "mlx-vlm puts rows of whole tiles, and as many for the ends of lines, in the places of "
        "single tokens, which published models do not"
    ),
    "granite4_vision": "images add rows to layers all over the model, and only the head has rows",
    "indic_ocr": "it is several models in a row",
    "llmjpvl mistral_large3": "mlx-vlm has no processor for their images",
    "locateanything minicpmo minicpmv4_6 minicpmv4_7": (
        "an image's text has its number in the prompt, and here each image is prepared by itself"
    ),
    "minimax_m3": "its checkpoints are those of minimax_m3_vl without a tower, under a name of mlx-vlm's own",
    "nemotron_voicechat": "it listens and speaks in step with its text",
    "phi3_v": "negative numbers stand for images in its prompts",
    "phi4mm": "prompts with images have other weights (LoRA)",
    "bert bonsai clef colidefics3 colqwen2_5 d1 d1_omni decider2 dinov2 embedding_gemma2 ernie_image "
    "flux2 flux3 gemma3_embedding gliner2_5 ideogram4 laya lfm2_colbert lfm2_embedding lfm2_encoder "
    "llada_image llama_bidirec llama_nemotron_vl_embedding mage_flow ming_image minimax_h3 "
    "ministral3_embedding modernbert moge3 moss_image openai_privacy_filter pp_doclayout_v3 "
    "qwen3_embedding qwen3_vl_embedding qwen_image rfdetr rt_detr_v2 sam3 sam3_1 sam3d_body "
    "sam3d_objects sapiens2 siglip video_depth_anything xlm_roberta yolo11 z_image": "they write no text",
}

DENIED: Mapping[str, str] = {name: why for names, why in _REASONS.items() for name in names.split()}
"""By the name of the folder in mlx-vlm."""
