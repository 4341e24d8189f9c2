"""How a node gets models: in turn, from members or the hub, and only those it got can be removed."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from closed import make_sick
from enginekeeping import keeper_of
from localhub import COMMIT, LocalHub, local_hub
from patience import until

from sealring.mesh.errors import (
    Conflict,
    FailedPrecondition,
    InvalidInput,
    ModelError,
    NotFound,
    SealringError,
    Unavailable,
)
from sealring.mesh.system.pace import Reached
from sealring.node.daemon import fetching
from sealring.node.daemon.engines import EngineKeeper
from sealring.node.daemon.fetching import Fetcher
from sealring.node.models.folders import NOTE
from sealring.node.models.giving import ModelGiver
from sealring.node.models.kept import hash_of_files, is_part, note_of
from sealring.node.models.manifest import Manifest
from sealring.node.models.partial_model import PartialModel


class Members:
    """Members that have one model, or that wait with their answer until `may` is set."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []
        self.may = asyncio.Event()
        self.may.set()
        self.error: SealringError | None = None
        self.manifest: Manifest | None = None
        """What they have, and give nothing of."""

    async def fetch(self, model: str, partial: PartialModel, progress: Any, *more: Any) -> bool:
        self.asked.append(model)
        progress(1, 2)
        await self.may.wait()
        if self.manifest is not None:
            partial.begin(self.manifest)
        if self.error is not None:
            raise self.error
        if model in self.names:
            (partial.path / "config.json").write_text("{}")
        return model in self.names


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with local_hub("org/model", {"config.json": b"{}", "model.safetensors": b"weights"}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield running


def make(tmp_path: Path, members: Members, *, allowed: bool = True) -> Fetcher:
    folders = [tmp_path / "own", tmp_path / "fetched"]
    home, linked = tmp_path / "fetched", tmp_path / "linked"
    return Fetcher([*folders, linked], home, members, linked=linked, allowed=allowed)  # type: ignore[arg-type]


async def test_members_are_asked_before_the_hub(hub: LocalHub, tmp_path: Path) -> None:
    members = Members("org/model")
    fetcher = make(tmp_path, members)
    assert await fetcher.fetch("org/model") == tmp_path / "fetched" / "org" / "model"
    assert members.asked == ["org/model"]
    assert not hub.asked
    assert fetcher.pulls == {}


async def test_what_no_member_has_comes_from_the_hub(hub: LocalHub, tmp_path: Path) -> None:
    fetcher = make(tmp_path, Members())
    found = await fetcher.fetch("org/model")
    assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors", NOTE}
    assert not PartialModel(tmp_path / "fetched", "org/model").path.exists()
    assert (tmp_path / "fetched" / ".metadata_never_index").exists(), "backups leave it out"
    await fetcher.look()
    assert [one.name for one in fetcher.messages()] == ["org/model"]


async def test_what_members_have_and_do_not_give_comes_from_the_hub(hub: LocalHub, tmp_path: Path) -> None:
    members = Members()
    members.error = Unavailable("all are busy", reason="MODEL_NOT_GIVEN")
    fetcher = make(tmp_path, members)
    (tmp_path / "theirs").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "theirs" / name).write_bytes(content)
    members.manifest = Manifest.of(tmp_path / "theirs")
    found = await fetcher.fetch("org/model")
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert not is_part(found), "what the members described and did not give is not noted"
    members.manifest = None
    for name, also in (("org/other", "; the hub: there is no model org/other"), ("other", "")):
        with pytest.raises(Unavailable) as raised:
            await fetcher.fetch(name)
        assert (raised.value.message, raised.value.reason) == (f"all are busy{also}", "MODEL_NOT_GIVEN")


def keeper_beside(folder: Path, fetcher: Fetcher) -> EngineKeeper:
    return keeper_of(folder, [folder / "own", folder / "fetched"], fetcher)


async def test_a_whole_model_of_another_commit_than_is_deployed_is_refused(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched, or in the Hugging Face cache; nobody knows the commit of a copy made by hand."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    fetcher = make(tmp_path, Members())
    keeper = keeper_beside(tmp_path, fetcher)
    places = [await fetcher.fetch("org/model", commit=COMMIT)]
    cached = tmp_path / "hf" / "models--org--cached"
    places.append(cached / "snapshots" / COMMIT)
    for folder, content in ((cached / "refs", COMMIT), (places[1], "{}")):
        folder.mkdir(parents=True)
        (folder / ("main" if folder.name == "refs" else "config.json")).write_text(content)
    for name, place in zip(("org/model", "org/cached"), places, strict=True):
        assert await keeper.for_stage(name, None, COMMIT) == place
        for asked in (keeper.for_stage(name, None, "e" * 40), fetcher.fetch(name, commit="e" * 40)):
            with pytest.raises(ModelError) as raised:
                await asked
            assert raised.value.reason == "OTHER_MODEL_VERSION"
            assert "commit cccccccc, and eeeeeeee" in raised.value.message
    (tmp_path / "own" / "by-hand").mkdir(parents=True)
    (tmp_path / "own" / "by-hand" / "config.json").write_text("{}")
    assert await keeper.for_stage("by-hand", None, "e" * 40) == tmp_path / "own" / "by-hand"


async def test_another_commit_with_the_same_files_is_the_same_model(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only a README has changed: fetched, or in the Hugging Face cache by the blobs linked to."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    fetcher = make(tmp_path, Members())
    keeper = keeper_beside(tmp_path, fetcher)
    fetched = await fetcher.fetch("org/model", commit=COMMIT)
    note = note_of(fetched)
    assert note is not None
    cached = tmp_path / "hf" / "models--org--cached"
    snapshot = cached / "snapshots" / COMMIT
    for path in (cached / "refs", cached / "blobs", snapshot):
        path.mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    linked = []
    for name, blob, content in (("config.json", "a" * 40, "{}"), ("README.md", "b" * 40, "read me")):
        (cached / "blobs" / blob).write_text(content)
        (snapshot / name).symlink_to(cached / "blobs" / blob)
        linked.append((name, len(content), blob))
    places = {"org/model": (fetched, note.hub_files), "org/cached": (snapshot, hash_of_files(linked[:1]))}
    for name, (place, files) in places.items():
        assert await keeper.for_stage(name, None, "e" * 40, files) == place
        for other in ("", "f" * 64):
            with pytest.raises(ModelError) as raised:
                await keeper.for_stage(name, None, "e" * 40, other)
            assert raised.value.reason == "OTHER_MODEL_VERSION"
    (snapshot / "tokenizer.json").write_text("{}")  # no link: nobody knows what the hub calls it
    with pytest.raises(ModelError):
        await keeper.for_stage("org/cached", None, "e" * 40, hash_of_files(linked[:1]))


async def test_what_a_stage_needs_comes_from_the_hub_once_its_headers_are_here(
    hub: LocalHub, tmp_path: Path
) -> None:
    header = b'{"a":{"dtype":"U8","shape":[33554432],"data_offsets":[0,33554432]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(range(256)) * (1 << 17)
    hub.files["model.safetensors"] = weights
    fetcher = make(tmp_path, Members())
    looked, sizes = [], []

    async def needs(path: Path) -> list[tuple[str, int, int]]:
        looked.append((path / "model.safetensors").read_bytes())
        sizes.append(fetcher.pulls["org/model"].size)
        return [("model.safetensors", (16 << 20) + 1, (16 << 20) + 2)]

    found = await fetcher.fetch("org/model", needs)
    assert sizes == [0], "a share of the headers alone would fall"
    (before,) = looked
    part, hole = 8 << 20, bytes(8 << 20)
    assert before == weights[:part] + bytes(len(weights) - part)
    assert (found / "model.safetensors").read_bytes() == (
        weights[:part] + hole + weights[2 * part : 3 * part] + bytes(len(weights) - 3 * part)
    )
    assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors", NOTE}
    with pytest.raises(NotFound):
        await ModelGiver("demo", [tmp_path / "fetched"], tmp_path, lambda: None).manifest(found)
    assert await fetcher.fetch("org/model") == found
    assert (found / "model.safetensors").read_bytes() == weights


async def test_a_fetch_that_fails_says_why_until_the_next(hub: LocalHub, tmp_path: Path) -> None:
    members = Members("org/model")
    members.error = Unavailable("they are gone")
    fetcher = make(tmp_path, members)
    with pytest.raises(Unavailable):
        await fetcher.fetch("org/model")
    assert fetcher.pulls["org/model"].problem == "they are gone"
    members.error = None
    with pytest.raises(NotFound):
        await fetcher.fetch("other")
    await fetcher.fetch("org/model")
    assert set(fetcher.pulls) == {"other"}


async def test_what_the_hub_does_not_have_is_told_as_the_hub_tells_it(hub: LocalHub, tmp_path: Path) -> None:
    fetcher = make(tmp_path, Members())
    with pytest.raises(NotFound) as missing:
        await fetcher.fetch("org/other")
    assert (missing.value.reason, "org/other" in str(missing.value)) == ("MODEL_NOT_FOUND", True)
    hub.lie = "commit"
    with pytest.raises(SealringError) as lied:
        await fetcher.fetch("org/model")
    assert lied.value.reason == "BAD_HUB_ANSWER"


async def test_who_gives_up_does_not_end_it_and_a_second_one_joins(tmp_path: Path) -> None:
    members = Members("model")
    members.may.clear()
    fetcher = make(tmp_path, members)
    first, second = (asyncio.create_task(fetcher.fetch("model")) for _ in range(2))
    await until(lambda: members.asked)
    first.cancel()
    assert (fetcher.pulls["model"].done, fetcher.pulls["model"].size) == (1, 2)
    members.may.set()
    assert await second == tmp_path / "fetched" / "model"
    assert members.asked == ["model"]


async def test_all_of_a_model_follows_a_part_that_is_coming(tmp_path: Path) -> None:
    members = Members()
    members.may.clear()
    fetcher = make(tmp_path, members)

    async def needs(path: Path) -> list[tuple[str, int, int]]:
        return []

    tasks = [fetcher.begin("model", needs), fetcher.begin("model"), fetcher.begin("model")]
    members.may.set()
    await asyncio.wait(tasks)
    assert members.asked == ["model", "model"]
    assert all(isinstance(task.exception(), NotFound) for task in tasks)
    assert fetcher.pulls["model"].problem


async def test_each_that_waits_fetches_what_it_needs_and_hears_how_far_the_others_are(tmp_path: Path) -> None:
    members = Members()
    members.may.clear()
    fetcher = make(tmp_path, members)
    heard = [asyncio.Event() for _ in range(3)]

    def needing(number: int) -> asyncio.Task[Path]:
        async def needs(path: Path) -> list[tuple[str, int, int]]:
            return []

        def progress(reached: Reached) -> None:
            if reached.share == 0.5:
                heard[number].set()

        return asyncio.create_task(fetcher.fetch("model", needs, progress=progress))

    tasks = [needing(number) for number in range(3)]
    for event in heard:
        await event.wait()
    members.may.set()
    await asyncio.wait(tasks)
    assert all(isinstance(task.exception(), NotFound) for task in tasks)
    assert members.asked == ["model"] * 3


async def test_nothing_is_fetched_where_the_owner_does_not_allow_it(tmp_path: Path) -> None:
    members = Members("model")
    with pytest.raises(FailedPrecondition) as raised:
        await make(tmp_path, members, allowed=False).fetch("model")
    assert raised.value.reason == "DOWNLOADS_NOT_ALLOWED"
    for name in ("../x", "a/b/c", "/etc", ""):
        with pytest.raises(InvalidInput):
            await make(tmp_path, members).fetch(name)
    assert not members.asked


async def test_only_what_was_fetched_is_removed(tmp_path: Path) -> None:
    fetcher = make(tmp_path, Members("model"))
    (tmp_path / "own" / "mine").mkdir(parents=True)
    (tmp_path / "own" / "mine" / "config.json").write_text("{}")
    await fetcher.fetch("model")
    await fetcher.remove("model")
    assert list((tmp_path / "fetched").rglob("*.json")) == []
    with pytest.raises(FailedPrecondition) as raised:
        await fetcher.remove("mine")
    assert raised.value.reason == "MODEL_NOT_FETCHED_HERE"
    assert (tmp_path / "own" / "mine" / "config.json").exists()
    with pytest.raises(NotFound):
        await fetcher.remove("model")
    with pytest.raises(InvalidInput):
        await fetcher.remove("../own/mine")


async def test_of_an_imported_model_only_the_link_is_removed(tmp_path: Path) -> None:
    fetcher, linked, theirs = make(tmp_path, Members()), tmp_path / "linked", tmp_path / "exo" / "org--model"
    other = tmp_path / "elsewhere"
    for folder in (theirs, other / "model", linked / "own" / "model"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (other / "link").symlink_to(theirs)
    (linked / "org").mkdir()
    (linked / "org" / "model").symlink_to(theirs)
    (linked / "away").symlink_to(other)
    await fetcher.look()
    assert {one.name for one in fetcher.messages() if one.fetched} >= {"org/model"}
    with pytest.raises(Conflict) as used:
        await fetcher.remove("org/model", lambda: [linked / "org" / "model"])
    assert used.value.reason == "MODEL_IN_USE"
    await fetcher.remove("org/model")
    assert not (linked / "org" / "model").is_symlink()
    for name in ("own/model", "away/model", "away/link"):
        with pytest.raises(FailedPrecondition) as refused:
            await fetcher.remove(name)
        assert refused.value.reason == "MODEL_NOT_FETCHED_HERE"
    for folder in (theirs, other / "model", other / "link", linked / "own" / "model"):
        assert (folder / "config.json").exists()


async def test_nothing_in_use_is_removed_and_what_is_being_removed_is_not_found(tmp_path: Path) -> None:
    """In use by whatever path leads there: "Demo" and "demo" are one folder on most Macs."""
    members = Members("model")
    fetcher = make(tmp_path, members)
    keeper = keeper_beside(tmp_path, fetcher)
    place = await fetcher.fetch("model")
    (tmp_path / "fetched" / "Model").symlink_to(place)
    with pytest.raises(Conflict) as used:
        await fetcher.remove("model", lambda: [tmp_path / "fetched" / "Model"])
    assert used.value.reason == "MODEL_IN_USE"
    assert await keeper.find("model") == place
    members.may.clear()
    other = fetcher.begin("other")  # which has the turn
    await until(lambda: members.asked[-1] == "other")
    asked = asyncio.Event()
    removing = asyncio.create_task(fetcher.remove("model", lambda: asked.set() or []))  # type: ignore[func-returns-value]
    await asked.wait()
    for name in ("model", "Model"):
        with pytest.raises(NotFound):
            await keeper.find(name)
    assert place.exists()
    members.may.set()
    await asyncio.wait([other])
    await removing
    assert not place.exists()


async def test_failed_fetches_hide_no_model_that_is_here(tmp_path: Path) -> None:
    members = Members()
    members.error = Unavailable("they are gone")
    fetcher = make(tmp_path, members)
    for name in ("here", "other"):
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "config.json").write_text("{}")
    await fetcher.look()
    names = [f"failed-{number}" for number in range(fetching.MAX_MODELS + 3)]
    for name in names:
        with pytest.raises(Unavailable):
            await fetcher.fetch(name)
    told = fetcher.messages()
    assert [one.name for one in told[:2]] == ["here", "other"]
    assert [one.name for one in told[2:]] == names[3:][: fetching.MAX_MODELS - 2], "the oldest are forgotten"
    members.error = None
    members.may.clear()
    coming = fetcher.begin("coming")
    await until(lambda: members.asked[-1] == "coming")
    assert fetcher.messages()[0].name == "coming"
    members.may.set()
    await asyncio.wait([coming])


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT])
async def test_a_folder_of_a_sick_volume_is_passed_over_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    fetcher = make(tmp_path, Members())
    for where in ("own", "fetched"):
        (tmp_path / where / "model").mkdir(parents=True)
        (tmp_path / where / "model" / "config.json").write_text("{}")
        (tmp_path / where / f"of-{where}").mkdir()
        (tmp_path / where / f"of-{where}" / "config.json").write_text("{}")
    with monkeypatch.context() as sick, structlog.testing.capture_logs() as logs:
        make_sick(sick, tmp_path / "own", error)
        for _ in range(3):
            await fetcher.look()
        assert [one.name for one in fetcher.messages()] == ["model", "of-fetched"]
    said = [one["event"] for one in logs if one["event"].startswith("model_folder")]
    assert said == ([] if error == errno.ENOENT else ["model_folder_unreadable"])
    await fetcher.look()
    assert {one.name for one in fetcher.messages()} == {"model", "of-own", "of-fetched"}


async def test_a_process_that_fetches_and_stands_still_holds_up_nobody(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = tmp_path / "stopped.py"
    stopped.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    fetcher = make(tmp_path, Members("other"))
    with monkeypatch.context() as still:
        for name, value in (
            *(("SILENT_SECONDS", 0.5), ("_LISTEN_SECONDS", 0.1)),
            *(("FETCH_MODULE", "stopped"), ("_QUIET", {"PYTHONPATH": str(tmp_path)})),
        ):
            still.setattr(fetching, name, value)
        with pytest.raises(Unavailable) as raised:
            await fetcher.fetch("org/model")
        assert (raised.value.reason, "does not answer" in raised.value.message) == ("MODEL_NOT_FETCHED", True)
    assert await fetcher.fetch("other") == tmp_path / "fetched" / "other"


async def test_folders_are_read_again_only_when_files_came_or_went(tmp_path: Path) -> None:
    """And while a file grows: that changes no time of its folder."""
    fetcher = make(tmp_path, Members())
    folder = tmp_path / "own" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    for size, told in ((10, 12), (20, 22), (20, 22), (30, 22)):
        weights.write_bytes(bytes(size))
        await fetcher.look()
        assert [(one.name, one.size, one.done) for one in fetcher.messages()] == [("mine", told, told)]
    (folder / "tokenizer.json").write_bytes(bytes(5))
    await fetcher.look()
    assert [one.size for one in fetcher.messages()] == [37]
    shutil.rmtree(folder)
    await fetcher.look()
    assert fetcher.messages() == []


async def test_a_model_is_measured_only_where_it_is_and_fetched_to_be_served(tmp_path: Path) -> None:
    members = Members("model")
    fetcher = make(tmp_path, members)
    keeper = keeper_beside(tmp_path, fetcher)
    with pytest.raises(NotFound) as raised:
        await keeper.profile("model")
    assert raised.value.metadata["fetchable"] == "yes"
    assert not members.asked
    assert await keeper.for_stage("model", None) == tmp_path / "fetched" / "model"
    assert await keeper.find("model") == tmp_path / "fetched" / "model"


class Measured(EngineKeeper):
    """Layers need the bytes of their numbers."""

    async def _ranges(self, lo: int, hi: int, path: Path) -> list[tuple[str, int, int]]:
        return [("model.safetensors", lo, hi)]


PART = 8


@pytest.mark.usefixtures("small_parts")
async def test_a_part_is_filled_up_only_for_layers_that_it_lacks(tmp_path: Path) -> None:
    source, home = tmp_path / "source", tmp_path / "fetched"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(bytes(range(16)))
    whole = Manifest.of(source)
    coming = PartialModel(home, "model")
    coming.begin(whole, [frozenset({0}), frozenset({0})])
    coming.add(0, 0, [b"{}"])
    coming.add(1, 0, [bytes(range(8))])
    coming.publish()
    members = Members("model")
    fetcher = make(tmp_path, members)
    await fetcher.look()
    assert [(one.size, one.done, one.fetched) for one in fetcher.messages()] == [(18, 10, True)]
    keeper = keeper_of(tmp_path, [home], fetcher, Measured)
    assert await keeper.for_stage("model", (0, 8)) == home / "model"
    assert not members.asked
    for layers in ((4, 9), None):
        members.asked.clear()
        assert await keeper.for_stage("model", layers) == home / "model"
        assert members.asked == ["model"]
    members.names = ()
    with pytest.raises(NotFound):
        await keeper.for_stage("model", (4, 9))  # the hub knows no such name
    later = tmp_path / "later"
    later.mkdir()
    source.rename(later / "model")  # behind the part, as what is fetched lies behind the owner's
    fetcher = Fetcher([home, later], later, members, linked=tmp_path / "linked", allowed=True)  # type: ignore[arg-type]
    members.asked.clear()
    keeper = keeper_of(tmp_path, [home, later], fetcher, Measured)
    for layers in ((4, 9), None):
        assert await keeper.for_stage("model", layers) == later / "model"
    assert await fetcher.fetch("model") == later / "model"
    assert not members.asked


async def test_a_fetch_that_failed_is_gone_after_a_day_or_once_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(fetching, "awake_clock", lambda: now[0])
    fetcher = make(tmp_path, Members())

    async def fail() -> None:
        with pytest.raises(NotFound):
            await fetcher.fetch("model")

    await fail()
    (held,) = fetcher.messages()
    assert (held.name, bool(held.problem), held.rate) == ("model", True, 0)
    now[0] += fetching.FAILED_SECONDS - 1
    assert fetcher.messages() == [held]
    now[0] += 1
    assert fetcher.messages() == []
    await fail()
    await fetcher.remove("model")
    assert fetcher.messages() == []
    with pytest.raises(NotFound):
        await fetcher.remove("model")
