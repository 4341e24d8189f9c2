"""exo's folders as exo makes them: what is found there, under which names, and what is linked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sealring.cli.setup.exo import Found, exo_folders, link, models_of_exo
from sealring.node.models.folders import local_model, models_in
from sealring.node.models.json_files import INDEX_VALUES

HOME = Path("/home/someone")


def make(folder: Path, name: str, *files: str, index: object = None) -> Path:
    """A model's folder with these files, of 10 bytes each, and an index that names these files."""
    model = folder / name
    model.mkdir(parents=True)
    for file in files:
        (model / file).write_bytes(bytes(10))
    if index is not None:
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def problems(folder: Path) -> dict[str, str]:
    return {one.name: one.problem for one in models_of_exo([folder])}


def test_whole_models_are_served_by_their_hub_ids_from_where_they_are(tmp_path: Path) -> None:
    whole = make(tmp_path / "exo", "org--a-4bit", "config.json", "model.safetensors")
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    make(
        tmp_path / "exo",
        "org--b--c",
        "config.json",
        *parts,
        index={"weight_map": dict(enumerate(parts))},
    )
    for other in ("caches", "config", ".hidden--x", "a--..b"):
        make(tmp_path / "exo", other, "config.json", "model.safetensors")
    found = models_of_exo([tmp_path / "absent", tmp_path / "exo"])
    assert [(one.name, one.problem) for one in found] == [("org/a-4bit", ""), ("org/b--c", "")]
    assert found[0].size == 20
    into = tmp_path / "state" / "linked"
    for _ in range(2):
        link(found, into)
        assert local_model("org/a-4bit", [into]) == into / "org" / "a-4bit"
        assert [one.relative_to(into).as_posix() for one in models_in(into)] == ["org/a-4bit", "org/b--c"]
    assert (into / "org" / "a-4bit").resolve() == whole.resolve()
    assert not (into / "org" / "a-4bit" / "copied").exists()


def test_what_exo_has_deleted_or_moved_is_linked_no_more(tmp_path: Path) -> None:
    first, other = (
        make(tmp_path / name, "org--a", "config.json", "model.safetensors") for name in ("one", "two")
    )
    into = tmp_path / "linked"
    link(models_of_exo([tmp_path / "one"]), into)
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    link([], into)
    assert models_in(into) == []
    (into / "org" / "a").symlink_to(tmp_path / "nowhere")
    link(models_of_exo([tmp_path / "one", tmp_path / "two"]), into)
    assert (into / "org" / "a").resolve() == other.resolve()


def test_a_folder_of_the_owner_in_a_links_place_stays(tmp_path: Path) -> None:
    own = make(tmp_path / "linked" / "org", "a", "config.json", "model.safetensors")
    make(tmp_path / "exo", "org--a", "config.json", "model.safetensors")
    with pytest.raises(FileExistsError):
        link(models_of_exo([tmp_path / "exo"]), tmp_path / "linked")
    assert not own.is_symlink()


@pytest.mark.parametrize(
    ("files", "index", "problem"),
    [
        (["config.json", "model.safetensors", "tokenizer.json.partial"], None, "not fetched it whole"),
        (["model.safetensors"], None, "no config.json"),
        (["config.json"], None, "1 of 1 files of weights"),
        (["config.json", "a.safetensors"], {"weight_map": {"x": "a.safetensors", "y": "b"}}, "1 of 2 files"),
        (["config.json", "model.safetensors"], {"weight_map": [1]}, "its index cannot be read"),
        (["config.json", "model.safetensors"], {"weight_map": {"x": [1]}}, "its index cannot be read"),
        (["config.json", "model.safetensors"], [], "its index cannot be read"),
        (["config.json"], {"weight_map": {}, "x": [0] * INDEX_VALUES}, "its index cannot be read"),
    ],
)
def test_what_is_not_whole_says_so(tmp_path: Path, files: list[str], index: object, problem: str) -> None:
    make(tmp_path, "org--a", *files, index=index)
    assert problem in problems(tmp_path)["org/a"]


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    """Not a model's folder, not a file of it, not a loop; links inside the folder are what they are."""
    exo, outside = (
        tmp_path / "exo",
        make(tmp_path / "elsewhere", "org--a", "config.json", "model.safetensors"),
    )
    inside = make(exo, "org--inside", "config.json", "model.safetensors")
    (exo / "org--out").symlink_to(outside)
    (exo / "org--loop").symlink_to(exo / "org--loop")
    (exo / "org--same").symlink_to(inside)
    for name in ("config.json", "model.safetensors"):
        file = make(exo, f"org--{name}", "config.json", "model.safetensors") / name
        file.unlink()
        file.symlink_to(outside / name)
    found = problems(exo)
    assert found.pop("org/inside") == found.pop("org/same") == ""
    assert "org/loop" not in found
    assert len(found) == 3
    assert all("leads out" in one for one in found.values())


def test_a_folder_of_very_many_files_is_no_model(tmp_path: Path) -> None:
    make(tmp_path, "org--a", *(f"{number}" for number in range(4100)))
    assert "too many files" in problems(tmp_path)["org/a"]


def test_of_two_with_one_name_the_whole_one_counts(tmp_path: Path) -> None:
    make(tmp_path / "one", "org--a", "config.json")
    make(tmp_path / "two", "org--a", "config.json", "model.safetensors")
    found = models_of_exo([tmp_path / "one", tmp_path / "two"])
    assert found == [Found("org/a", (tmp_path / "two" / "org--a").resolve(), 20, "")]


@pytest.mark.parametrize(
    ("environment", "platform", "folders"),
    [
        ({}, "darwin", ["/home/someone/.exo/models", "/home/someone/.cache/exo/downloads"]),
        ({}, "linux", ["/home/someone/.local/share/exo/models", "/home/someone/.exo/models"]),
        ({"XDG_DATA_HOME": "/data"}, "linux", ["/data/exo/models"]),
        ({"EXO_HOME": "my/exo"}, "darwin", ["/home/someone/my/exo/models"]),
        (
            {
                "EXO_MODELS_READ_ONLY_DIRS": "/nfs:",
                "EXO_MODELS_DIRS": "/a:/b",
                "EXO_DEFAULT_MODELS_DIR": "/d",
            },
            "darwin",
            ["/nfs", "/a", "/b", "/d"],
        ),
        ({"EXO_MODELS_DIR": "not/absolute"}, "darwin", ["/home/someone/.exo/models"]),
    ],
)
def test_folders_are_those_that_exo_reads(
    environment: dict[str, str], platform: str, folders: list[str]
) -> None:
    found = [str(one) for one in exo_folders(environment, HOME, platform)]
    assert found[: len(folders)] == folders


def test_folders_are_few() -> None:
    many = ":".join(f"/{number}" for number in range(9999))
    assert len(exo_folders({"EXO_MODELS_DIRS": many}, HOME, "linux")) == 32
