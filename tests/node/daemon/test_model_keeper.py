from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from closed import make_sick
from enginekeeping import keeper_of

from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.model_keeper import ModelKeeper


def seat(path: str, phase: Phase = Phase.UP) -> Any:
    return SimpleNamespace(phase=phase, stage=SimpleNamespace(path=path, adapter=""))


def keeper(engines: Any, *seats: Any) -> ModelKeeper:
    return ModelKeeper(SimpleNamespace(), engines, seats, AsyncMock())  # type: ignore[arg-type]


async def test_the_model_of_every_ring_that_is_up_is_stated() -> None:
    """Also where two are alike: the files of one may have become those of the other."""
    files = {"a": "11" * 32, "copy of a": "11" * 32, "b": "00" * 32, "loading": "22" * 32}

    async def profile(path: str, adapter: str = "") -> Any:
        return SimpleNamespace(digest=files[path])

    seats = [seat(path, Phase.PREPARING if path == "loading" else Phase.UP) for path in files]
    served = await keeper(SimpleNamespace(profile=profile), *seats).served()
    assert served == (bytes(32), b"\x11" * 32, b"\x11" * 32)


async def test_a_served_model_whose_volume_is_sick_is_not_stated_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros would state a changed model, and the node would be distrusted until its restart."""
    engines = keeper_of(tmp_path, ())
    (tmp_path / "sick").mkdir()
    models = keeper(engines, *(seat(str(tmp_path / name)) for name in ("sick", "gone")))
    with monkeypatch.context() as volume:
        make_sick(volume, tmp_path / "sick")
        assert await models.served() == (bytes(32),)
