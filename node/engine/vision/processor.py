"""mlx-vlm's processor of a model's family. `python -m sealring.node.engine.vision.processor` is the process
that `node/engine/vision/viewing.py` starts for one: it prepares images for the tower. It gets pixels and no
files.

A processor is given one image, and the text that stands for it in a chat. It returns the text that takes this
place in the prompt, and the arrays for the family's tower. The head's own tokenizer makes the prompt's
tokens. The one here only has to tell special tokens from text, so it knows these and single bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from huggingface_hub import constants
from PIL import Image

from sealring.mesh.errors import SealringError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.configuration import with_parts
from sealring.node.engine.helper import hold_to, serve
from sealring.node.engine.vision import mlx_vlm_import
from sealring.node.models.json_files import read_json

_PLACEHOLDERS = ("image_token", "boi_token")
"""What processors call the text that stands for an image in a chat. Of some it is `<image>`, or a row's
token."""

_OFFSET, _COUNT = "vocab_offset", "vocab_size"
"""Settings of a tower that embeds tokens itself: the first of these, and their number. Gemma 3n's embeds the
end of an image."""

_TEXT_SIDE = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    *mlx_vlm_import.ROW_TOKENS,
}
"""What a processor says of its text."""

_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
_LIBRARIES = ("mlx-vlm", "transformers", "pillow")


_FIRST = 224, 224
"""Pixels of an image that is prepared before the first of a prompt."""


class RefusedError(ValueError):
    """The family's code makes nothing of an image. Its text says how."""


class Prepared(NamedTuple):
    """An image, ready for the tower."""

    text: str
    """Stands for the image in the prompt."""

    rows: int
    """Tokens of it whose embeddings are replaced."""

    before: int
    """Special tokens right before the first of these."""

    behind: int
    """Special tokens right behind the last."""

    tokens: int
    """All that stand for it, with those between rows."""

    arrays: Mapping[str, npt.NDArray[Any]]
    """What the family's tower takes, by its names."""


class Processor:
    """The processor of the model in `folder`, whose special tokens are `special`, by name.

    Raises ModelError, FailedPrecondition (VISION_NOT_INSTALLED), and whatever the family's code does.
    """

    def __init__(self, folder: Path, special: Mapping[str, int]) -> None:
        constants.HF_HUB_OFFLINE = True  # a folder that lacks a file is not completed from elsewhere
        config = with_parts(_read(folder, "config.json"))
        self._tokenizer = _tokenizer(folder, special)
        self._names = {number: name for name, number in special.items()}
        self._bytes = {number: _letters()[letter] for letter, number in _letter_ids(special).items()}
        family, defaults, vision_defaults = _family(config)
        self._processor: Any = family.from_pretrained(str(folder), trust_remote_code=False)
        found = [each.get(name) for each in (config, defaults) for name in mlx_vlm_import.ROW_TOKENS]
        row_token = next(one for one in found if isinstance(one, int))
        embeds = _embedded(config, vision_defaults)
        self.row_tokens = [row_token, *sorted(embeds.intersection(special.values()) - {row_token})]
        """Tokens whose embeddings an image's rows replace; the first is that of nearly all."""
        names = (getattr(self._processor, name, None) for name in _PLACEHOLDERS)
        self.placeholders = [
            *dict.fromkeys(
                [
                    *(one for one in names if isinstance(one, str) and one),
                    "<image>",
                    *(name for name, number in special.items() if number == row_token),
                ]
            )
        ]
        versions = [importlib.metadata.version(name) for name in _LIBRARIES]
        contents = [(folder / name).read_bytes() for name in _FILES if (folder / name).is_file()]
        parts = [*(one.encode() for one in versions), *contents]
        self.identity = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
        """A hash of libraries and settings. With the file it decides what is made of an image."""

    def prepare(self, image: Image.Image, placeholder: str) -> Prepared:
        """An RGB image that stands where a chat's template writes `placeholder`.

        Raises RefusedError where the family's code refuses it.
        """
        try:
            made = dict(self._processor(images=[image], text=[placeholder]))
        except MemoryError:
            raise
        except Exception as error:  # for example an image that is much wider than high
            raise RefusedError(f"the model's processor refuses it ({type(error).__name__})") from None
        ids: list[int] = np.array(made["input_ids"]).reshape(-1).tolist()
        places = [place for place, token in enumerate(ids) if token in self.row_tokens]
        if not places:
            raise RefusedError("the model's processor makes nothing of it")
        before = behind = 0
        while before < places[0] and ids[places[0] - before - 1] in self._names:
            before += 1
        while places[-1] + behind + 1 < len(ids) and ids[places[-1] + behind + 1] in self._names:
            behind += 1
        arrays = {
            name: np.ascontiguousarray(np.array(value))
            for name, value in made.items()
            if name not in _TEXT_SIDE and not name.startswith("_") and value is not None
        }
        tokens = before + places[-1] + 1 - places[0] + behind
        return Prepared(self._spell(ids), len(places), before, behind, tokens, arrays)

    def _spell(self, ids: list[int]) -> str:
        return b"".join(
            self._names[token].encode() if token in self._names else self._bytes[token] for token in ids
        ).decode()


def _embedded(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[int]:
    """Tokens that the tower embeds."""
    vision = {**defaults, **(config.get("vision_config") or {})}
    first, count = vision.get(_OFFSET), vision.get(_COUNT)
    return set(range(first, first + count)) if isinstance(first, int) and isinstance(count, int) else set()


def _family(config: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """The class of the family's processors, and what mlx-vlm assumes of what a configuration leaves out, of
    the model and of its tower.

    mlx-vlm's packages put their processors into transformers' AutoProcessor, and hide there why one failed.
    """
    model_type = str(config.get("model_type", ""))
    mlx_vlm_import.family("base")  # registers mlx-vlm
    from mlx_vlm.models import base

    found: dict[str, Any] = {}

    def install(types: str | list[str], processor: Any) -> None:
        for name in [types] if isinstance(types, str) else types:
            found[name.lower()] = processor

    base.install_auto_processor_patch = install
    package = mlx_vlm_import.family(model_type)
    if package is None or model_type.lower() not in found:
        raise ValueError(f"mlx-vlm has no processor for {model_type}")
    return found[model_type.lower()], vars(package.ModelConfig), vars(package.VisionConfig)


def _tokenizer(folder: Path, special: Mapping[str, int]) -> Any:
    """A tokenizer of the special tokens and of bytes, which transformers' classes find from now on."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE({**_letter_ids(special), **special}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    settings = {**_read(folder, "special_tokens_map.json"), **_read(folder, "tokenizer_config.json")}
    extra = settings.get("extra_special_tokens")
    named: dict[str, str] = {}
    for name, value in {**settings, **(extra if isinstance(extra, dict) else {})}.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str) and token in special:
            named[name] = token
    own = {
        name: named.pop(name)
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if name in named
    }
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=named, clean_up_tokenization_spaces=False, **own
    )
    if made.pad_token is None:
        made.pad_token = made.eos_token or next(iter(special))
    for found_by in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        setattr(found_by, "from_pretrained", staticmethod(lambda *_, **__: made))  # noqa: B010
    return made


def _letter_ids(special: Mapping[str, int]) -> dict[str, int]:
    """The characters that stand for bytes, behind the special tokens."""
    return {letter: number for number, letter in enumerate(_letters(), max(special.values()) + 1)}


def _letters() -> dict[str, bytes]:
    """GPT-2's characters for bytes."""
    from sealring.node.engine.byte_level import byte_level_table

    return {letter: bytes([byte]) for letter, byte in byte_level_table().items()}


def _read(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    found = read_json(file) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def main() -> None:
    """Answers until standard input ends; a signal ends the process where one answer takes too long.

    Arguments: as node.engine.text.template. The first question names the folder and the special tokens, each
    further one has an image's pixels, their `size`, and the `target` size to which they are scaled.
    """
    forbid_core_files()
    seconds, address = map(int, sys.argv[1:])
    hold_to(address)
    processor: Processor | None = None

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal processor
        try:
            if processor is None:
                processor = _begin(asked)
                return {
                    "placeholders": processor.placeholders,
                    "row_tokens": processor.row_tokens,
                    "identity": processor.identity,
                }
            image = Image.frombytes("RGB", tuple(asked["size"]), asked["data"])
            target = tuple(asked["target"])
            if image.size != target:
                image = image.resize(target, Image.Resampling.BICUBIC)
            text, rows, before, behind, tokens, arrays = processor.prepare(image, asked["placeholder"])
        except RefusedError as error:
            return {"bad": str(error)}
        except MemoryError:
            raise
        except Exception as error:  # a library's, whose words may quote what it was given
            return {"failed": error.reason if isinstance(error, SealringError) else type(error).__name__}
        ordered = sorted(arrays.items(), key=lambda one: -one[1].itemsize)  # so that each is aligned
        return {
            "text": text,
            "rows": rows,
            "before": before,
            "behind": behind,
            "tokens": tokens,
            "arrays": [[name, array.dtype.str, array.shape] for name, array in ordered],
            "data": [array.reshape(-1).view(np.uint8) for _, array in ordered],
        }

    serve(answer, seconds)


def _begin(asked: Mapping[str, Any]) -> Processor:
    """Nothing that a library prints may come between answers."""
    printed, sys.stdout = sys.stdout, sys.stderr
    # where there is a GPU, MLX keeps what was freed, up to the bound at which this process is ended
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(0)
    try:
        made = Processor(Path(asked["folder"]), asked["special"])
        for placeholder in made.placeholders:  # libraries load parts with the first image
            with contextlib.suppress(RefusedError):
                made.prepare(Image.new("RGB", _FIRST), placeholder)
                break
        return made
    finally:
        sys.stdout = printed


if __name__ == "__main__":
    main()
