from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import NotFound
from sealring.node.models.folders import FolderState, bundled_model, local_model

REVISION = "a" * 40


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_names_below_the_folders_and_absolute_paths(tmp_path: Path) -> None:
    demo = make(tmp_path / "second" / "demo")
    nested = make(tmp_path / "second" / "org" / "big")
    folders = [tmp_path / "first", tmp_path / "second"]
    assert local_model("demo", folders) == demo
    assert local_model("demo", []) == bundled_model()
    assert local_model("org/big", folders) == nested
    assert local_model("anyone/demo", folders) == demo
    assert local_model(str(demo), []) == demo


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../demo",
        "a/../b",
        "a/b/c",
        "-x",
        "a\0b",
        "/tmp/../etc",
        "demo/",
        "a..b",
        "x" * 300,
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path / "models" / "demo")
    with pytest.raises(NotFound) as raised:
        local_model(name, [tmp_path / "models" / "demo"])
    assert raised.value.reason == "MODEL_NOT_FOUND"


@given(st.text(max_size=40))
def test_whatever_is_found_lies_below_the_folders(name: str) -> None:
    folder = Path(__file__).parent
    try:
        found = local_model(name, [folder])
    except NotFound:
        return
    assert found is None or name.startswith("/") or folder in found.parents


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert local_model("org/name", []) is None
    folder = tmp_path / "models--org--name"
    snapshot = make(folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    assert local_model("org/name", []) == snapshot
    (folder / "refs" / "main").write_text("../../../etc")
    assert local_model("org/name", []) is None


def test_a_changed_folder_has_another_state(tmp_path: Path) -> None:
    demo = make(tmp_path / "demo")
    before = FolderState.read(demo)
    assert FolderState.read(demo) == before
    (demo / "config.json").write_text('{"layers": 2}')
    assert FolderState.read(demo) != before
    with pytest.raises(NotFound):
        FolderState.read(tmp_path / "absent")
