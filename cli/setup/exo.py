"""Models that exo has fetched to this machine. A node serves them through links, without a copy.

exo keeps a model ORG/NAME in a folder ORG--NAME of its models folders, with the files that the hub has. A
file that has not come whole ends in `.partial`. Folders and variables: exo's README ("Environment Variables")
and `src/exo/shared/constants.py` of https://github.com/exo-explore/exo at b5375f8c, June 2026. EXO_MODELS_DIR
was the variable from October 2025 to March 2026 (d46c7e6a, 15f1b61f), ~/.cache/exo/downloads the folder in
March 2025 (`exo/download/new_shard_download.py` at 04d5dca1). exo's app gives the variables to exo alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sealring.mesh.errors import SealringError
from sealring.node.models.folders import HUB_ID, files_in, is_file
from sealring.node.models.json_files import read_json

_LISTS = ("EXO_MODELS_READ_ONLY_DIRS", "EXO_MODELS_DIRS")
_SINGLE = ("EXO_DEFAULT_MODELS_DIR", "EXO_MODELS_DIR")
_MOST_FOLDERS, _MOST_ENTRIES = 32, 4096


@dataclass(frozen=True)
class Found:
    """A model of exo: our name for it, its folder, its bytes, and why it cannot be served, or ""."""

    name: str
    folder: Path
    size: int
    problem: str


def exo_folders(environment: Mapping[str, str], home: Path, platform: str) -> list[Path]:
    """The folders of models that exo may have, in the order in which exo looks. Not all of them exist."""
    named = [one for name in _LISTS for one in environment.get(name, "").split(":")]
    named += [environment.get(name, "") for name in _SINGLE]
    folders = [Path(one).expanduser() for one in named if one]
    if own := environment.get("EXO_HOME"):
        folders += [home / own / "models", home / own / "downloads"]
    if platform == "linux":
        folders.append(Path(environment.get("XDG_DATA_HOME") or home / ".local/share") / "exo" / "models")
    folders += [home / ".exo" / "models", home / ".cache" / "exo" / "downloads"]
    return [one for one in dict.fromkeys(folders) if one.is_absolute()][:_MOST_FOLDERS]


def models_of_exo(folders: Sequence[Path]) -> list[Found]:
    """The models in these folders by name; of two with one name the first that can be served.

    A folder that cannot be read has none. Nothing outside of the folders is read.
    """
    found: dict[str, Found] = {}
    for folder in folders:
        for one in _models_in(folder):
            if one.name not in found or (found[one.name].problem and not one.problem):
                found[one.name] = one
    return sorted(found.values(), key=lambda one: one.name.lower())


def link(models: Sequence[Found], into: Path) -> None:
    """Makes the links ORG/NAME in `into`, and removes those whose model is gone. Raises OSError."""
    for old in into.glob("*/*"):
        if old.is_symlink() and not old.exists():
            old.unlink()
    for one in models:
        place = into / one.name
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place.is_symlink() and place.readlink() != one.folder:
            place.unlink()
        if not place.is_symlink():
            place.symlink_to(one.folder, target_is_directory=True)


def _models_in(folder: Path) -> Iterator[Found]:
    try:
        root = folder.resolve(strict=True)
        entries = sorted(islice(root.iterdir(), _MOST_ENTRIES))
    except (OSError, RuntimeError):  # a loop of links
        return
    for path in entries:
        name = path.name.replace("--", "/", 1)
        if HUB_ID.fullmatch(name) and ".." not in name:
            try:
                if path.is_dir():
                    yield _looked_at(name, path, root)
            except (OSError, RuntimeError, SealringError) as error:
                yield Found(name, path, 0, str(error))


def _looked_at(name: str, path: Path, root: Path) -> Found:
    if not path.resolve().is_relative_to(root):
        return Found(name, path, 0, "its folder is a link that leads out of exo's")
    files = dict(files_in(path))
    for inner, entry in files.items():
        if not Path(entry.path).resolve().is_relative_to(root):
            return Found(name, path, 0, f"its file {inner} is a link that leads out of exo's folder")
    return Found(name, path, sum(one.stat().st_size for one in files.values()), _missing(path, set(files)))


def _missing(path: Path, names: set[str]) -> str:
    """What a model in this folder lacks, or ""."""
    if any(name.endswith(".partial") for name in names):
        return "exo has not fetched it whole"
    if "config.json" not in names:
        return "no config.json: not a language model, or not whole"
    wanted = {"model.safetensors"}
    if is_file(path / "model.safetensors.index.json"):
        try:
            wanted = set(read_json(path / "model.safetensors.index.json")["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return "its index cannot be read, or has more entries than a model"
    elif any(name.endswith(".safetensors") for name in names):
        return ""
    lacking = len(wanted - names)
    return f"{lacking} of {len(wanted)} files of weights are not there" if lacking else ""
