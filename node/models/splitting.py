"""Writes the parts of a model that each stage needs into a folder for each, for small machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sealring.node.models.kept import beginnings, headers, with_ranges
from sealring.node.models.manifest import PART, Manifest, open_inside
from sealring.node.models.partial_model import PartialModel

Range = tuple[str, int, int]


def split(
    folder: Path, into: Path, stages: Sequence[Sequence[Range]], tell: Callable[[str], None]
) -> list[tuple[Path, int]]:
    """For each stage its folder `into/stage-K/NAME`, filled with the parts of its ranges, and their bytes.

    Parts from an earlier call stay. `tell` receives lines of progress. Raises ModelError
    (MODEL_FOLDER_UNUSABLE, MODEL_PART_DAMAGED), ResourceExhausted (DISK_FULL), ConfigError
    (STATE_UNWRITABLE), OSError.
    """
    tell(f"reading {folder.name}")
    manifest = Manifest.of(folder)
    common = headers(manifest, beginnings(manifest), folder)
    made = []
    for number, ranges in enumerate(stages):
        partial = PartialModel(into / f"stage-{number}", folder.name)
        partial.begin(manifest, with_ranges(manifest, common, ranges))
        for index, (file, parts) in enumerate(zip(manifest.files, partial.missing(), strict=True)):
            descriptor = open_inside(folder, file.name)
            try:
                for part in sorted(parts):
                    partial.add(index, part, [os.pread(descriptor, file.length(part), part * PART)])
                    tell(f"stage {number}: {partial.done / max(1, partial.size):.0%}")
            finally:
                os.close(descriptor)
        made.append((partial.publish(), partial.size))
    return made
