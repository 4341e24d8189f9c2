import errno
from pathlib import Path

import pytest
from closed import closed, make_sick
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import NotFound, Unavailable
from sealring.node.models.folders import FolderState, bundled_model, local_model, models_in

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
    assert local_model("demo-vision", []) == bundled_model("demo-vision") != bundled_model()
    assert local_model("org/big", folders) == nested
    assert local_model("anyone/demo", folders) == demo
    assert local_model(str(demo), []) == demo
    (tuned := tmp_path / "second" / "tuned").mkdir()
    (tuned / "adapter_config.json").write_text("{}")
    assert local_model("tuned", folders) == tuned
    assert models_in(tmp_path / "second") == [demo, nested, tuned]


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
    assert found in (None, bundled_model()) or name.startswith("/") or folder in found.parents


def test_a_folder_that_may_not_be_entered_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's home: what is elsewhere is found, and what is not says why."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "home"
    make(home / "models" / "theirs")
    mine = make(tmp_path / "second" / "mine")
    folders = [home / "models", tmp_path / "second"]
    with closed(home):
        assert local_model("mine", folders) == local_model("org/mine", folders) == mine
        assert local_model("demo", folders) == bundled_model()
        for name in ("theirs", "org/theirs"):
            with pytest.raises(NotFound) as missing:
                local_model(name, folders)
            assert missing.value.reason == "MODEL_FOLDER_UNREADABLE"
            assert (str(home / "models") in missing.value.message, "home folders" in missing.value.hint) == (
                True,
                True,
            )
        for look in (lambda: local_model(str(home / "models" / "theirs"), []), lambda: models_in(home)):
            with pytest.raises((Unavailable, PermissionError)):
                look()
        with pytest.raises(Unavailable) as closed_one:
            FolderState.read(home / "models" / "theirs")
        assert closed_one.value.reason == "MODEL_FOLDER_UNREADABLE"
    with pytest.raises(NotFound) as gone:
        FolderState.read(home / "models" / "other")
    assert gone.value.reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_sick_volume_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    mine = make(tmp_path / "second" / "mine")
    make(tmp_path / "nas" / "theirs")
    make_sick(monkeypatch, tmp_path / "nas", error)
    assert local_model("mine", [tmp_path / "nas", tmp_path / "second"]) == mine
    with pytest.raises(NotFound) as missing:
        local_model("theirs", [tmp_path / "nas"])
    assert (missing.value.reason, missing.value.hint) == (
        "MODEL_FOLDER_UNREADABLE",
        "check the volume that it is on",
    )


def test_models_lie_one_or_two_folders_below(tmp_path: Path) -> None:
    expected = [make(tmp_path / name) for name in ("a", "b/c", "b/d")]
    make(tmp_path / "b" / "d" / "e")
    (tmp_path / "file").write_text("")
    assert models_in(tmp_path) == sorted(expected)
    with closed(tmp_path / "b"):
        assert models_in(tmp_path) == [tmp_path / "a"]
    with pytest.raises(FileNotFoundError):
        models_in(tmp_path / "other")


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
    before = FolderState.read(demo)
    (demo / "pictures").mkdir()
    (demo / "pictures" / "config.json").touch()
    (demo / "1_Pooling").mkdir()
    (demo / "1_Pooling" / "README.md").touch()
    assert FolderState.read(demo) == before
    (demo / "1_Pooling" / "config.json").touch()
    assert [name for name, _, _ in FolderState.read(demo).files if "/" in name] == ["1_Pooling/config.json"]
    with pytest.raises(NotFound):
        FolderState.read(tmp_path / "absent")
