"""Attention of few new tokens on an NVIDIA GPU, in one kernel.

MLX has such a kernel for one token without a mask. Drafts (2 to 16 tokens of a row) and rows of different
lengths (a mask) are several operations, whose launches take the host as long as an H200 computes the layer.

A block computes one query of one head. Each of its warps takes keys by turns, `TOGETHER` at once, so that
their loads overlap, and keeps a running maximum and sum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). At the end the warps' sums are added. A query that may see no key gets zeros.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import mlx.core as mx

FEW = 16
"""Most new tokens. More are worth matrix products."""

MOST = 16384
"""Most pairs of new and held tokens, of all rows. Each query reads all keys of its head anew, so matrix
products are faster for more (measured on an H200: docs/decisions/0014)."""

_WARPS = 16
_WIDEST = 256  # of a head: a lane holds that many / 32 numbers of a query and of a sum of values
_GROUP = 16  # most query heads of a key head

_SOURCE = """
  constexpr int WARPS = %(warps)d, TOGETHER = 4, OWN = WIDTH / 32, SUMS = VALUES / 32;
  const int lane = threadIdx.x %% 32, warp = threadIdx.x / 32;
  const int fresh = q_shape[2], held = k_shape[2];
  const int token = blockIdx.y %% fresh, head = blockIdx.y / fresh, row = blockIdx.z;
  const int end = CAUSAL ? held - fresh + token + 1 : held;
  const auto* query = q + row * q_strides[0] + head * q_strides[1] + token * q_strides[2];
  const auto* keys = k + row * k_strides[0] + (head / GROUP) * k_strides[1];
  const auto* values = v + row * v_strides[0] + (head / GROUP) * v_strides[1];
  %(mask)s
  float own[OWN], sums[SUMS], sum = 0.0f, most = -3e38f;
  for (int i = 0; i < OWN; i++) own[i] = float(%(scale)sf) * float(query[(lane + 32 * i) * q_strides[3]]);
  for (int i = 0; i < SUMS; i++) sums[i] = 0.0f;
  for (int first = warp * TOGETHER; first < end; first += WARPS * TOGETHER) {
    float score[TOGETHER], top = most;
    for (int n = 0; n < TOGETHER; n++) {
      const int key = min(first + n, end - 1);
      score[n] = 0.0f;
      for (int i = 0; i < OWN; i++)
        score[n] += own[i] * float(keys[key * k_strides[2] + (lane + 32 * i) * k_strides[3]]);
    }
    for (int n = 0; n < TOGETHER; n++) {
      const int key = first + n;
      for (int other = 16; other; other /= 2) score[n] += __shfl_xor_sync(0xffffffff, score[n], other);
      if (key >= end) score[n] = __int_as_float(0xff800000);
      %(masked)s
      top = fmaxf(top, score[n]);
    }
    const float less = expf(most - top);
    most = top;
    sum *= less;
    for (int i = 0; i < SUMS; i++) sums[i] *= less;
    for (int n = 0; n < TOGETHER; n++) {
      const int key = min(first + n, end - 1);
      const float weight = expf(score[n] - top);
      sum += weight;
      for (int i = 0; i < SUMS; i++)
        sums[i] += weight * float(values[key * v_strides[2] + (lane + 32 * i) * v_strides[3]]);
    }
  }
  __shared__ float tops[WARPS], totals[WARPS], parts[WARPS][VALUES];
  if (lane == 0) { tops[warp] = most; totals[warp] = sum; }
  for (int i = 0; i < SUMS; i++) parts[warp][lane + 32 * i] = sums[i];
  __syncthreads();
  float top = %(sink)s, total = 0.0f;
  for (int n = 0; n < WARPS; n++) top = fmaxf(top, tops[n]);
  for (int n = 0; n < WARPS; n++) total += totals[n] * expf(tops[n] - top);
  total += expf(%(sink)s - top) * SINKS;
  for (int i = threadIdx.x; i < VALUES; i += WARPS * 32) {
    float mean = 0.0f;
    for (int n = 0; n < WARPS; n++) mean += parts[n][i] * expf(tops[n] - top);
    out[((row * fresh + token) * (gridDim.y / fresh) + head) * VALUES + i] =
        static_cast<T>(total > 0.0f ? mean / total : 0.0f);
  }
"""

_MASK = """const auto* seen = mask + (mask_shape[0] > 1) * row * mask_strides[0]
      + (mask_shape[1] > 1) * head * mask_strides[1] + (mask_shape[2] > 1) * token * mask_strides[2];"""

_MASKED = {
    "allowed": "if (key < end && !seen[key * mask_strides[3]]) score[n] = __int_as_float(0xff800000);",
    "added": "if (key < end) score[n] += float(seen[key * mask_strides[3]]);",
}


def suits(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> bool:
    """Whether `attention` can compute these and is the fastest way; the arguments are its own."""
    rows, heads, new, width = queries.shape
    groups, held, wide = keys.shape[1], keys.shape[2], values.shape[3]
    array = isinstance(mask, mx.array)
    return (
        (1 < new <= FEW or (new == 1 and array))
        and new <= held
        and rows * new * held <= MOST
        and not width % 32
        and not wide % 32
        and max(width, wide) <= _WIDEST
        and heads <= _GROUP * groups
        and queries.dtype == keys.dtype == values.dtype
        and (not array or (mask.ndim <= 4 and mask.shape[-1] == held))
    )


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of [rows, heads, new, width] over [rows, groups, held, width], in the dtype of both.

    A group's heads adjoin. `mask`: bool (True is seen) or numbers that are added, which broadcast to [rows,
    heads, new, held]; or "causal". `sinks` [heads]: a score for each head that takes weight and has no value.
    """
    rows, heads, new, width = queries.shape
    inputs, kind = [queries, keys, values], ""
    if isinstance(mask, mx.array):
        kind = "allowed" if mask.dtype == mx.bool_ else "added"
        inputs.append(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
    if sinks is not None:
        inputs.append(sinks)
    (found,) = _kernel(scale, kind, sinks is not None, tuple(str(one.dtype) for one in inputs[3:]))(
        inputs=inputs,
        template=[
            ("T", queries.dtype),
            ("WIDTH", width),
            ("VALUES", values.shape[3]),
            ("GROUP", heads // keys.shape[1]),
            ("CAUSAL", isinstance(mask, str)),
            ("SINKS", int(sinks is not None)),
        ],
        grid=(32 * _WARPS, heads * new, rows),
        threadgroup=(32 * _WARPS, 1, 1),
        output_shapes=[(rows, new, heads, values.shape[3])],
        output_dtypes=[queries.dtype],
    )
    # in the order in which models concatenate heads, so that nothing is copied
    turned: mx.array = found.swapaxes(1, 2)
    return turned


@lru_cache(maxsize=64)
def _kernel(scale: float, kind: str, sinks: bool, dtypes: tuple[str, ...]) -> Any:
    """The kernel for mask and sinks of these `dtypes`. MLX finds a compiled kernel by its name and template
    alone. So the name says all else that it was compiled from, such as the scale of a model before."""
    source = _SOURCE % {
        "warps": _WARPS,
        "scale": f"{scale:.9e}",
        "mask": _MASK if kind else "",
        "masked": _MASKED.get(kind, ""),
        "sink": "float(sinks[head])" if sinks else "-3e38f",
    }
    names = ["q", "k", "v"] + ["mask"] * bool(kind) + ["sinks"] * sinks
    digest = hashlib.sha256("".join([*dtypes, source]).encode()).hexdigest()[:16]
    return mx.fast.cuda_kernel(
        name=f"sealring_attention_{digest}",
        input_names=names,
        output_names=["out"],
        source=source,
        ensure_row_contiguous=False,
    )
