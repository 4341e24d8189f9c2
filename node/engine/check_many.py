"""Checks many configurations, each with random weights.

`python -m sealring.node.engine.check_many FILE OPTIONS KEY...` prints a line of JSON for each key.
OPTIONS are JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from sealring.mesh.errors import ModelError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.apart import answers
from sealring.node.engine.caches import OneRow, for_one_row, trimmable
from sealring.node.engine.caches.undo import runs_of
from sealring.node.engine.check import check, read_configurations
from sealring.node.engine.staging import build_skeleton
from sealring.node.engine.staging.adapters import Adapter
from sealring.node.engine.staging.anatomy import dissect, full_cache
from sealring.node.engine.staging.quantization import BITS, cache_quantization


def outcome(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The outcome of `check` (`exact`, `wrong` or `refused`), and the abilities of the caches.

    `adapter`: whether sealring has a hook of its own for the architecture. `rows_together`: whether rows that
    decode are computed as a batch. `kv_bits`: the numbers of bits that its KV cache can have. `prefixes`:
    whether kept prefixes can be cut to `any` length or serve as a `whole` only. `drafts`: whether a row's
    last tokens can be taken back. Raises InvalidInput.
    """
    found: dict[str, Any] = {"model_type": config["model_type"]}
    try:
        report = check(config, **options)
    except ModelError as error:
        return found | {"outcome": "refused", "reason": error.reason, "why": error.message}
    model = build_skeleton(config)
    anatomy = dissect(model, report.model_type)
    cache = for_one_row(full_cache(model), anatomy.adapter.batches)
    try:
        cache_quantization(model, report.model_type, BITS[0])
        kv_bits = list(BITS)
    except ModelError:
        kv_bits = []
    return found | {
        "outcome": "exact" if report.right else "wrong",
        "stages": len(report.stages),
        "adapter": type(anatomy.adapter) is not Adapter
        or anatomy.adapter.state != Adapter.state
        or anatomy.adapter.together is not None,
        "rows_together": not isinstance(cache, OneRow),
        "kv_bits": kv_bits,
        "prefixes": "any" if trimmable(cache) else "whole",
        "drafts": runs_of(cache, 2, anatomy.adapter.steps_alike) > 0,
    }


def main() -> int:
    forbid_core_files()
    file, options, *keys = sys.argv[1:]
    configurations = read_configurations(file)
    return answers(partial(outcome, configurations[key], **json.loads(options)) for key in keys)


if __name__ == "__main__":
    sys.exit(main())
