"""Whether a small model may guess for a large one: the tokens of both have to be the same, to the id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sealring.mesh.errors import ModelError
from sealring.node.engine.contents import check_folder
from sealring.node.engine.text.tokenizer import load_tokenizer

_HINT = "take a small model of the same family, or leave the draft model out"


def check_alike(model: Path, draft: Path) -> None:
    """Raises ModelError (DRAFT_NOT_ALIKE) unless every id that both tokenizers have is the same token.

    One may have more ids than the other: vocabularies are padded, and later models of a family have more
    special tokens. Also raises what reading a tokenizer raises.
    """
    for path in (model, draft):
        check_folder(path)
    if _same_files(model, draft):
        return
    one, other = (_by_id(load_tokenizer(path, chats=False).names()) for path in (model, draft))
    both = one.keys() & other.keys()
    differing = [number for number in both if one[number] != other[number]]
    if differing or not both:
        raise ModelError(
            f"{draft.name} cannot guess for {model.name}: of {len(both)} token ids that both have, "
            f"{len(differing)} are other tokens",
            reason="DRAFT_NOT_ALIKE",
            hint=_HINT,
        )


def cannot_go_back(name: str) -> ModelError:
    """The error of a draft model with caches of a kind that wrong guesses cannot be taken out of."""
    return ModelError(
        f"{name} cannot guess: a wrong guess could not be taken out of caches of its kind",
        reason="DRAFT_NOT_REVERSIBLE",
        hint="take another small model of the same family",
    )


def _same_files(model: Path, draft: Path) -> bool:
    files = [path / "tokenizer.json" for path in (model, draft)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def _by_id(names: Mapping[str, int]) -> dict[int, str]:
    return {number: name for name, number in names.items()}
