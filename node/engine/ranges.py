"""The bytes of a model's weight files that a stage is made of, and whether they are here.

mlx-lm renames, stacks and converts weights while it loads them, for each architecture in its own way. So the
graph of the stage's own parameters is followed back to the tensors that were loaded: nothing is evaluated.
`python -m sealring.node.engine.ranges PATH SPLIT` prints the ranges of every stage of a split.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from sealring.mesh.errors import ModelError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.apart import answer
from sealring.node.engine.mapped_table import tables_of
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.mtp_head import keeps_embedding
from sealring.node.engine.staging.splicing import embedded
from sealring.node.engine.vision.sizes import tower_sizes
from sealring.node.engine.vision.tower import load_tower
from sealring.node.engine.weights import (
    has_mtp_head,
    load_lazily,
    load_mtp_head,
    read_header,
    weight_files,
)
from sealring.node.models.kept import note_of, parts_between
from sealring.node.models.manifest import blank_parts

Range = tuple[str, int, int]
"""A file's name and its bytes [first, end)."""

_RECORDING = threading.Lock()
"""One thread at a time puts its own `mx.load` in place: each has to find the real one."""

_NODE = re.compile(r'\{ (\d+) \[label ="([^"]*)"')
_INPUT = re.compile(r'"(\w+)" -> (\d+)')
_OUTPUT = re.compile(r'(\d+) -> "(\w+)"')


def needed(path: Path, lo: int, hi: int) -> list[Range]:
    """The bytes of files that the layers [lo, hi) need, with embedding, norm and head if they need them. The
    last have the MTP head with them, if there is one, and the first the vision tower.

    Only the headers of the weights have to be in the folder. Raises ModelError as `weights.load_stage`.
    """
    with _recorded() as loaded:
        model, config = load_lazily(path, parts=True)
        anatomy = dissect(model, config["model_type"])
        stage = Stage(model, anatomy, lo, hi)
        made = list(stage.kept)
        if stage.spec.is_tail and has_mtp_head(path, config):
            made += load_mtp_head(path, model, shares=keeps_embedding(model, stage.kept)).kept
        if stage.spec.is_head and tower_sizes(path, config)["residents"]:
            tower = load_tower(path, *embedded(model))
            made += tower.kept if tower is not None else []
    found: list[Range] = []
    wanted = _sources(made, [array for _, _, array in loaded])
    by_file: dict[str, list[tuple[int, int]]] = {}
    headers: dict[str, tuple[int, dict[str, Any]]] = {}
    for index in wanted:
        file, name, _ = loaded[index]
        if file not in headers:
            header = read_header(Path(file))
            headers[file] = 8 + len(header), json.loads(header)
        start, entries = headers[file]
        first, end = entries[name]["data_offsets"]
        by_file.setdefault(Path(file).name, []).append((start + first, start + end))
    for table in tables_of(anatomy.layers[lo:hi]):
        for file, first, end in table.ranges:
            by_file.setdefault(file, []).append((first, end))
    for file, ranges in sorted(by_file.items()):
        for first, end in sorted(ranges):
            if found and found[-1][0] == file and found[-1][2] == first:
                found[-1] = (file, found[-1][1], end)
            else:
                found.append((file, first, end))
    return found


def check_here(path: Path, lo: int, hi: int) -> None:
    """Raises ModelError (MODEL_PART_MISSING) where a folder holds parts of a model, and not these layers'.

    What is not there reads as zeros, which would go unnoticed.
    """
    note = note_of(path)
    if note is not None:
        here = note.whole or note.holds(needed(path, lo, hi))
    else:  # perhaps it was left behind by a copy
        blank = _blank(path)
        here = not any(blank.values()) or not any(
            blank[name].intersection(parts_between(first, end)) for name, first, end in needed(path, lo, hi)
        )
    if not here:
        raise _missing(path, f"without all of the layers {lo} to {hi - 1}")


def check_whole(path: Path) -> None:
    """Raises ModelError (MODEL_PART_MISSING) where a folder holds only parts of a model, by note or zeros."""
    note = note_of(path)
    if any(_blank(path).values()) if note is None else not note.whole:
        raise _missing(path, "and all of it is needed")


def _blank(path: Path) -> dict[str, set[int]]:
    """The parts of each weight file that are all zeros."""
    found = {}
    for file in weight_files(path):
        with file.open("rb") as stream:
            found[file.name] = blank_parts(stream.fileno(), file.stat().st_size)
    return found


def _missing(path: Path, what: str) -> ModelError:
    return ModelError(
        f"the folder {path.name} holds a part of the model, {what}",
        hint="fetch the rest: sealring model pull",
        reason="MODEL_PART_MISSING",
    )


@contextmanager
def _recorded() -> Iterator[list[tuple[str, str, mx.array]]]:
    """Every tensor that this thread loads meanwhile: its file, its name and the array."""
    loaded: list[tuple[str, str, mx.array]] = []
    own = threading.get_ident()

    def load(file: Any, *arguments: Any, **named: Any) -> Any:
        got = real(file, *arguments, **named)
        if threading.get_ident() == own and isinstance(got, dict):
            loaded.extend((str(file), name, array) for name, array in got.items())
        return got

    with _RECORDING:
        real = mx.load
        mx.load = load
        try:
            yield loaded
        finally:
            mx.load = real


def _sources(made: Sequence[mx.array], loaded: Sequence[mx.array]) -> list[int]:
    """Indices of the arrays of `loaded` that `made` consists of. Raises ModelError if something else was
    read."""
    own = {f"L{index}": array for index, array in enumerate(loaded)}
    ends = {f"E{index}": mx.stop_gradient(array) for index, array in enumerate(made)}  # a node of its own
    with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
        mx.export_to_dot(file.name, **own, **ends)
        text = file.read()
    labels = dict(_NODE.findall(text))
    inputs: dict[str, list[str]] = {}
    for name, node in _INPUT.findall(text):
        inputs.setdefault(node, []).append(name)
    makers = {name: node for node, name in _OUTPUT.findall(text)}
    waiting, seen = list(ends), set(ends)
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        if node is None:
            continue
        if labels[node] == "Load" and name not in own:
            raise ModelError(
                "the model reads weights in a way that cannot be followed",
                hint="fetch the whole model",
                reason="MODEL_NOT_DIVISIBLE",
            )
        for one in inputs.get(node, ()):
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return [index for index, name in enumerate(own) if name in seen]


def main() -> int:
    """Prints the ranges of each stage of the folder named on the command line as `apart.answer` does."""
    forbid_core_files()
    parser = argparse.ArgumentParser(prog="python -m sealring.node.engine.ranges")
    parser.add_argument("path", type=Path)
    parser.add_argument("split", help="layers per stage, A,B,...")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    ends = [0]
    for layers in arguments.split.split(","):
        ends.append(ends[-1] + int(layers))
    stages = list(pairwise(ends))
    return answer(lambda: {"stages": [needed(arguments.path, lo, hi) for lo, hi in stages]})


if __name__ == "__main__":
    sys.exit(main())
