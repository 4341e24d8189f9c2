"""What MLX has to compile for a CPU, a second of a processor for each engine, shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

from sealring.node import scratch


def share_kernels(state_dir: Path) -> None:
    """Has a local cluster, or a machine, find what any test before had compiled."""
    scratch.claim()
    kept, temporary = Path(os.environ["TMPDIR"]) / "mlx", state_dir / "tmp"
    kept.mkdir(exist_ok=True)
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (temporary / "mlx").exists():
        (temporary / "mlx").symlink_to(kept)
