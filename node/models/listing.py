"""The list of files of a repository on the Hugging Face hub, checked before any file is fetched.

huggingface_hub reads answers of any length. The server at HF_ENDPOINT need not be the hub, so the length of
the answer is bounded here, and every entry is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sealring.mesh.errors import ModelError
from sealring.mesh.names import is_commit, is_sha256
from sealring.node.models.folders import CONFIGURATIONS, HUB_ID, NAME, not_found
from sealring.node.models.json_files import parse_json
from sealring.node.models.manifest import MAX_BYTES, MAX_FILES, belongs

_MAX_LIST = 8 << 20
_MAX_VALUES = 1 << 18
"""Most bytes of the answer. The hub's answer has about 270 for each file."""

_MAX_SMALL = 64 << 20
"""Most bytes of a file in git itself. The hub accepts none above 10 MB."""

_SHOWN = 80


@dataclass(frozen=True)
class HubFile:
    """One file: its size in bytes, and its SHA-256, or for a small one the SHA-1 of its git blob."""

    name: str
    size: int
    sha256: str
    blob: str


def files_of(model: str, commit: str, pieces: Iterable[bytes]) -> tuple[str, tuple[HubFile, ...]]:
    """The commit of a list, and its files of the model, sorted by name. `pieces` are the hub's answer.

    Raises NotFound (MODEL_NOT_FOUND), ModelError (BAD_HUB_ANSWER, MODEL_TOO_LARGE).
    """
    answer = _read(pieces, _too_large(model, f"a list of files of more than {_MAX_LIST >> 20} MiB"))
    with _well_formed():
        found, named = answer["sha"], [entry["rfilename"] for entry in answer["siblings"]]
        mine = [entry for entry, name in zip(answer["siblings"], named, strict=True) if belongs(name)]
    if not isinstance(found, str) or not is_commit(found) or (commit and commit != found):
        raise bad_answer("it names another commit than was asked for")
    if not any(name in named for name in CONFIGURATIONS):
        raise not_found(model, "the repository holds no model and no adapter")
    if len(mine) > MAX_FILES:
        raise _too_large(model, f"{len(mine)} files of a model")
    files = sorted((_checked(entry) for entry in mine), key=lambda one: one.name)
    if len({one.name.lower() for one in files}) < len(files):  # a Mac's disk takes "A" and "a" for one file
        raise bad_answer("it lists a file twice")
    size = sum(one.size for one in files)
    if size > MAX_BYTES:
        raise _too_large(model, f"{size >> 30} GiB of a model")
    return found, tuple(files)


def found_in(pieces: Iterable[bytes], most: int) -> list[dict[str, Any]]:
    """The first models of a search by `id`, how often each was fetched (`downloads`) and liked (`likes`).

    Those without a well-formed id are left out. Raises ModelError (BAD_HUB_ANSWER).
    """
    answer = _read(pieces, bad_answer("its list of models is too long"))
    if not isinstance(answer, list):
        raise bad_answer("it is no list of models")
    models = [one for one in answer if isinstance(one, dict) and _is_id(one.get("id"))]
    return [
        {"id": one["id"]}
        | {name: one.get(name) if type(one.get(name)) is int else 0 for name in ("downloads", "likes")}
        for one in models[:most]
    ]


def _is_id(name: Any) -> bool:
    return isinstance(name, str) and any(kind.fullmatch(name) for kind in (HUB_ID, NAME))


def address(endpoint: str, model: str, commit: str) -> str:
    """The URL of the list with sizes and hashes."""
    revision = f"/revision/{quote(commit, safe='')}" if commit else ""
    return f"{endpoint}/api/models/{quote(model)}{revision}?blobs=true"


def bad_answer(why: str) -> ModelError:
    """The error for an invalid answer of the hub, or of a server in its place."""
    return ModelError(
        f"the hub's answer is invalid: {why}",
        hint="try again; if it stays so, fetch the model by other means and put it into a models folder",
        reason="BAD_HUB_ANSWER",
    )


def _read(pieces: Iterable[bytes], too_long: ModelError) -> Any:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) > _MAX_LIST:
            raise too_long
    with _well_formed():
        return parse_json(bytes(held), _MAX_VALUES)


@contextmanager
def _well_formed() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError):
        raise bad_answer("it is no list") from None


def _checked(entry: dict[str, Any]) -> HubFile:
    name, size, blob, lfs = (entry.get(key) for key in ("rfilename", "size", "blobId", "lfs"))
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else ""
    if type(size) is not int or size < 0 or not isinstance(sha256, str) or not isinstance(blob, str | None):
        raise bad_answer(f"its list has no size or hash of {str(name)[:_SHOWN]}")
    if lfs is not None and not is_sha256(sha256):
        raise bad_answer(f"its list has no size or hash of {str(name)[:_SHOWN]}")
    if lfs is None and (size > _MAX_SMALL or not is_commit(blob or "")):
        raise bad_answer(f"its list has no hash of {str(name)[:_SHOWN]}")
    return HubFile(str(name), size, sha256, blob or "")


def _too_large(model: str, what: str) -> ModelError:
    return ModelError(
        f"the repository of {model} holds {what}",
        hint=f"at most {MAX_FILES} files of {MAX_BYTES >> 30} GiB together can be passed on to other nodes",
        reason="MODEL_TOO_LARGE",
    )
