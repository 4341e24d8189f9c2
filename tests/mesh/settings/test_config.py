from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from refusals import refused

from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.settings.config import Loaded, load
from sealring.mesh.settings.types import Address


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")

    listen: str = "127.0.0.1:7700"
    count: int = Field(3, ge=1, le=9, description="how many, 1 to 9")
    state: Path = Path("state")
    folders: list[Path] = []
    names: list[str] = []
    fast: bool = False

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        if ":" not in value:
            raise InvalidInput("no port in the address", hint="host:port", reason="BAD_ADDRESS")
        return value


def read(file: Path | None = None, **environment: str) -> Loaded[Shape]:
    return load(Shape, "node", file=file, environment=environment)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sealring.toml"


def test_defaults_say_so() -> None:
    loaded = read()
    assert loaded.settings == Shape()
    assert set(loaded.origin.values()) == {"default"}


def test_flags_beat_environment_beats_file(file: Path) -> None:
    file.write_text('[node]\nlisten = "a:1"\ncount = 2\nfast = true\n')
    loaded = load(
        Shape,
        "node",
        file=file,
        environment={"SEALRING_NODE_LISTEN": "b:2", "SEALRING_NODE_COUNT": "4", "SEALRING_DEBUG": "1"},
        flags={"listen": "c:3", "count": None},
    )
    assert (loaded.settings.listen, loaded.settings.count, loaded.settings.fast) == ("c:3", 4, True)
    assert loaded.origin == {
        "listen": "flag --listen",
        "count": "env:SEALRING_NODE_COUNT",
        "fast": f"file:{file}",
        "state": "default",
        "folders": "default",
        "names": "default",
    }


def test_environment_lists_are_commas_or_json() -> None:
    assert read(SEALRING_NODE_FOLDERS="/a, /b").settings.folders == [Path("/a"), Path("/b")]
    assert read(SEALRING_NODE_NAMES='["x,y", "z"]').settings.names == ["x,y", "z"]
    with pytest.raises(ConfigError, match="is not JSON"):
        read(SEALRING_NODE_NAMES="[")


def test_an_empty_path_is_not_the_working_folder(file: Path) -> None:
    file.write_text('[node]\nstate = ""\n')
    for given in (
        lambda: read(file),
        lambda: read(SEALRING_NODE_STATE=""),
        lambda: load(Shape, "node", flags={"state": ""}, environment={}),
    ):
        with pytest.raises(ConfigError, match=r"'state' of section .* is refused: it is empty") as caught:
            given()
        assert caught.value.reason == "BAD_SETTING"
    with pytest.raises(ConfigError, match="'folders'"):
        load(Shape, "node", flags={"folders": ["/a", ""]}, environment={})
    assert read(SEALRING_NODE_NAMES="").settings.names == []


def test_home_is_expanded_where_no_shell_does(file: Path) -> None:
    file.write_text('[node]\nfolders = ["~/models", "~root/models"]\n')
    loaded = read(file, SEALRING_NODE_STATE="~/state", SEALRING_NODE_LISTEN="~/x:1")
    assert loaded.settings.state == Path.home() / "state"
    assert loaded.settings.folders == [Path.home() / "models", Path("~root/models")]
    assert loaded.settings.listen == "~/x:1"


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ('[node]\nlisen = "a:1"\n', "UNKNOWN_SETTING", ["'lisen'", "[node]", "did you mean listen?"]),
        ("[nod]\n", "UNKNOWN_SETTING", ["[nod]", "did you mean node?"]),
        ("[quux]\n", "UNKNOWN_SETTING", ["known are: cli, coordinator, gateway, node"]),
        ("node = 3\n", "BAD_CONFIG_FILE", ["not a table"]),
        (f"[node]\ncount = {'9' * 5000}\n", "BAD_CONFIG_FILE", ["too long a number"]),
        ("[node]\nfolders = [3]\n", "BAD_SETTING", ["'folders.0'", "not a valid path"]),
        ("[node\n", "BAD_CONFIG_FILE", ["not TOML", "line 1"]),
        ("[node]\ncount = 10\n", "BAD_SETTING", ["'count'", "less than or equal to 9", "how many, 1 to 9"]),
        ('[node]\nfast = "perhaps"\n', "BAD_SETTING", ["'fast'", "boolean"]),
        ('[node]\nlisten = "x"\n', "BAD_ADDRESS", ["[node]", "no port"]),
    ],
)
def test_a_bad_file_is_named(file: Path, text: str, reason: str, words: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert caught.value.reason == reason
    for word in words:
        assert word in str(caught.value)
    if reason in ("UNKNOWN_SETTING", "BAD_CONFIG_FILE", "BAD_SETTING"):
        assert str(file) in str(caught.value)


class Pair(BaseModel):
    first: Address = "127.0.0.1:1"
    second: int = 0

    @model_validator(mode="after")
    def _fit(self) -> Pair:
        if self.second:
            raise ValueError("first and second do not go together")
        return self


def test_what_does_not_go_together_is_of_no_one_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Pair, "node", environment={}, flags={"second": 1})
    assert str(caught.value) == "section [node] is refused: first and second do not go together"


def test_a_checks_own_hint_stands_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Pair, "node", environment={}, flags={"first": "nowhere"})
    assert str(caught.value).count("hint: ") == 1
    assert caught.value.hint == "for example 127.0.0.1:7700"
    with pytest.raises(ConfigError) as caught:
        load(Pair, "node", environment={}, flags={"second": "x"})
    assert not caught.value.hint


def test_a_file_that_is_no_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(file)


def test_a_named_file_has_to_exist_and_to_be_one(file: Path) -> None:
    for place, reason in ((file, "CONFIG_FILE_MISSING"), (file.parent, "BAD_CONFIG_FILE")):
        with refused(reason, ConfigError):
            read(place)


def test_a_config_file_has_a_size_limit(file: Path) -> None:
    file.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="larger"):
        read(file)


def test_an_environment_typo_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        read(SEALRING_NODE_LISTN="a:1")
    assert caught.value.hint == "did you mean SEALRING_NODE_LISTEN?"
    with pytest.raises(ConfigError) as caught:
        read(**{f"SEALRING_NODE_{'X' * 100}": "1"})
    assert caught.value.metadata["name"] == f"SEALRING_NODE_{'X' * 66}"


def test_a_bad_value_names_its_source() -> None:
    with pytest.raises(ConfigError, match="from env:SEALRING_NODE_COUNT, is refused"):
        read(SEALRING_NODE_COUNT="many")
    with pytest.raises(ConfigError, match="from flag --count, is refused"):
        load(Shape, "node", environment={}, flags={"count": 0})


def test_values_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        read(SEALRING_NODE_COUNT="hunter2")
    assert "hunter2" not in str(caught.value)
