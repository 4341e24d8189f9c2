from pathlib import Path

import pytest

from mesh.errors import NotFound
from node import daemon_engines
from node.daemon_engines import EngineKeeper
from node.memory import MemoryMeter

FETCH = """
import argparse, os
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--control-fd", type=int)
arguments = parser.parse_args()
folder = Path(os.environ["HF_HUB_CACHE"]) / ("models--" + arguments.model.replace("/", "--"))
snapshot = folder / "snapshots" / ("b" * 40)
snapshot.mkdir(parents=True)
(snapshot / "config.json").write_text("{}")
(folder / "refs").mkdir()
(folder / "refs" / "main").write_text("b" * 40)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def test_a_model_that_is_not_here_is_fetched_where_that_is_allowed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "fetch.py"
    script.write_text(FETCH)
    real = daemon_engines.Child.spawn

    async def spawn(name: str, arguments: list[str], **rest: object) -> object:
        assert arguments[:2] == ["-m", "node.fetch"]
        return await real(name, [str(script), *arguments[2:]], **rest)

    monkeypatch.setattr(daemon_engines.Child, "spawn", spawn)
    refusing = EngineKeeper([], MemoryMeter(None), allow_downloads=False)
    with pytest.raises(NotFound):
        await refusing.find("org/model")
    allowing = EngineKeeper([], MemoryMeter(None), allow_downloads=True)
    found = await allowing.find("org/model")
    assert found == cache / "models--org--model" / "snapshots" / ("b" * 40)
    assert await refusing.find("org/model") == found


async def test_a_fetch_that_fails_is_told_with_a_hint(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_engines, "FETCH_MODULE", "node.no_such_module")
    keeper = EngineKeeper([], MemoryMeter(None), allow_downloads=True)
    with pytest.raises(NotFound) as raised:
        await keeper.find("org/model")
    assert "network" in raised.value.hint
