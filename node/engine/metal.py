"""Apple GPUs: how much MLX hands to the GPU at once.

MLX ends a command buffer after 20 to 50 operations, or as soon as the arrays that they read have 40 or 50 MB
(mlx/backend/metal/device.cpp). The GPU stands still for about 20 us between two. Large weights end one in
each layer, so a step of a mixture of experts has 45 to 90. Measured by others, tokens the same to the bit:

* M3 Ultra, GLM-5.3-Flash: 30.9 ms a token, 28.7 with 1,000 operations and 400 MB, at the same peak of memory.
  A dense 27B in 8 bits: no difference. 3,200 tiny operations: 8.8 ms, 7.7 with 200 operations
  (ml-explore/mlx#4521).
* M1 Ultra, Gemma 3n: 82.7 tokens/s, 93.2 with 1,000 operations (lablup/mlxcel#353). Qwen3.6-35B-A3B: 58.2
  tokens/s, 91.4 with 2,000 MB (vllm-project/vllm-metal#637), which costs memory (#585 there).
* M5 Max: at most 1.7 %, which is noise (lablup/mlxcel#358).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from sealring.mesh.system.sysctl import sysctl

OPERATIONS = "200"
"""Saves three quarters of the buffers; 1,000 would save 19 of 20. But the GPU does not begin before the first
buffer is complete, and in a ring of several members nothing hides that. The CPU takes about 0.4 ms for 200
operations (an estimate)."""

MEGABYTES = "400"

_BEFORE_M5 = re.compile(r"Apple M[1-4]\b")


def prepare(read: Callable[[str], bytes] = sysctl) -> None:
    """Raises both limits on an M1 to M4, unless the environment has them.

    Called before any computation, and before MLX is asked for its device's properties: then it reads them.
    """
    if _BEFORE_M5.match(read("machdep.cpu.brand_string").decode(errors="replace")):
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", OPERATIONS)
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", MEGABYTES)
