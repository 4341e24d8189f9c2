"""Architectures whose rows mlx-lm computes in a batch as it computes them alone.

`make sweep` has shown it of each. Of any other it is not known, and its rows
are computed one after the other: slower, and right.
"""

_SHOWN = """
    afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 cohere
    cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone
    exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2
    gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan_v1_dense internlm2
    internlm3 jamba kimi_linear Klear laguna lfm2 lfm2_moe lille_130m llama llama4 llama4_text
    longcat_flash mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3
    mistral4 mixtral muse_glimmer nanbeige nemotron nemotron_h nemotron_nas olmo2 olmo3 olmo_hybrid
    olmoe openelm phi phi3 phimoe phixtral plamo plamo2 plamo3 qwen qwen2 qwen2_moe qwen3 qwen3_5
    qwen3_moe qwen3_next recurrent_gemma seed_oss spark2_5 stablelm starcoder2 step3p5 telechat3
    youtu_llm
"""

BATCHING = frozenset(_SHOWN.split())
"""mlx-lm modules that define the layers, with underscores."""
