"""Writes a model with fewer bits a weight, as `mlx_lm.convert` does: a process of its own.

`python -m sealring.node.engine.convert FOLDER INTO --bits 4` reads one array after another. Code that comes
with a model is neither run nor copied, and a tower is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from sealring.mesh.errors import ModelError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.apart import Tell, answer_telling
from sealring.node.engine.converted import GROUP
from sealring.node.engine.profile import COVERED
from sealring.node.engine.weights import load_lazily, read_config

_TELL_SECONDS = 0.5
_WRITTEN = {"config.json", "modules.json"}


def convert(folder: Path, into: Path, bits: int, tell: Tell = lambda done, total: None) -> dict[str, Any]:
    """Writes the model of `folder` with weights of `bits` bits into a new folder; its `bytes`. `tell` hears
    of those that are converted.

    Raises ModelError (ALREADY_QUANTIZED, FOLDER_TAKEN), and as `load_lazily`.
    """
    if "quantization" in read_config(folder):
        raise ModelError(
            f"the weights of {folder.name} are quantized already",
            hint="deploy it as it is",
            reason="ALREADY_QUANTIZED",
        )
    if into.exists():
        raise ModelError(f"{into} is there already", hint="remove it, or give --into", reason="FOLDER_TAKEN")
    model, config = load_lazily(folder)
    utils = mlx_lm_import.import_utils()
    unfinished = into.with_name(f".{into.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        model, config = utils.quantize_model(model, config, GROUP, bits)
    with _told(sum(one.nbytes for _, one in tree_flatten(model.parameters())), tell):
        utils.save_model(unfinished, model, donate_model=True)
    utils.save_config(config, unfinished / "config.json")
    for name in COVERED - _WRITTEN:
        if (folder / name).is_file():
            shutil.copy(folder / name, unfinished / name)
    unfinished.rename(into)
    return {"bytes": sum(file.stat().st_size for file in into.iterdir())}


@contextlib.contextmanager
def _told(total: int, tell: Tell) -> Iterator[None]:
    """Evaluates the arrays of each file that mlx-lm saves meanwhile, of up to 5 GB, one after the other."""
    save, done, told = mx.save_safetensors, 0, 0.0

    def counted(file: str, arrays: dict[str, mx.array], **rest: Any) -> None:
        nonlocal done, told
        for array in arrays.values():
            mx.eval(array)
            done += array.nbytes
            if time.monotonic() >= told + _TELL_SECONDS or done == total:
                told = time.monotonic()
                tell(done, total)
        save(file, arrays, **rest)

    mx.save_safetensors = counted  # type: ignore[assignment]
    try:
        yield
    finally:
        mx.save_safetensors = save


def main() -> int:
    """Converts the folder that the command line names, and prints as `apart.answer` does."""
    forbid_core_files()
    parser = argparse.ArgumentParser(
        prog="python -m sealring.node.engine.convert", description=convert.__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("into", type=Path)
    parser.add_argument("--bits", type=int, required=True)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    return answer_telling(lambda tell: convert(arguments.folder, arguments.into, arguments.bits, tell))


if __name__ == "__main__":
    sys.exit(main())
