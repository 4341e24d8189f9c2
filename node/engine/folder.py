"""Loads a stage from a model folder, with the front at the head."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import structlog

from sealring.mesh.errors import ModelError, SealringError
from sealring.mesh.rpc.protocol12 import say_singly
from sealring.mesh.system.pace import LOADING, WARMING
from sealring.node.engine import device, sampling_kinds
from sealring.node.engine.blocks import BlockLayout, layout_of, provenance
from sealring.node.engine.borders import Borders, borders_of
from sealring.node.engine.cache_bytes import draft_bytes, kv_bytes, mark_bytes, with_kv_bits
from sealring.node.engine.caches.undo import can_go_back
from sealring.node.engine.canary import check_weights
from sealring.node.engine.canary_calls import check_calls
from sealring.node.engine.drafter_folder import drafter_message
from sealring.node.engine.drafts.drafter_models import kind_of
from sealring.node.engine.drafts.sources import Sources
from sealring.node.engine.grammar import Grammars
from sealring.node.engine.guessing import check_digest, load_sources
from sealring.node.engine.prefixes import Prefixes, support
from sealring.node.engine.profile import measure, profile
from sealring.node.engine.ranges import check_here, check_whole, needed
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.anatomy import dissect, full_cache, not_runnable
from sealring.node.engine.staging.doubled import Prefill, share
from sealring.node.engine.staging.splicing import embedded
from sealring.node.engine.text.alike import cannot_go_back, check_alike
from sealring.node.engine.text.front import Front
from sealring.node.engine.text.tokenizer import load_tokenizer
from sealring.node.engine.vision.sizes import can_see
from sealring.node.engine.vision.tower import Tower, load_tower
from sealring.node.engine.vision.viewing import FolderSight
from sealring.node.engine.warm_up import patience, timed, warm_up
from sealring.node.engine.weights import (
    cut_stage,
    load_lazily,
    load_shard,
    read_arrays,
    read_config,
    read_weights,
)
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import model_pb2 as model

if TYPE_CHECKING:
    from sealring.node.engine.disk import Disk

log = structlog.get_logger()

Emit = Callable[[engine.EngineEvent], None]

_LEAST_ROWS = 16
"""Rows up to which steps are timed whatever an epoch has: another may have more over the same stage."""

_PROGRESS_SECONDS = 0.5
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "qwen.tiktoken")


@dataclass(slots=True)
class Loaded:
    """A stage in memory and what it was loaded from."""

    stage: Stage
    front: Front | None
    command: engine.LoadStage
    measured: dict[str, Any]
    grammars: Grammars | None
    times: Sequence[control.StepTime] = ()
    layout: BlockLayout | None = None
    sources: Sources = field(default_factory=Sources)
    tower: Tower | None = None
    prefixes: Prefixes = field(init=False)
    borders: Borders = field(init=False)
    stored_at: engine.PrefixDisk | None = None

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(support(self.stage.prefill.make_cache()))
        self.borders = borders_of(self.stage)

    def serves(self, command: engine.LoadStage) -> bool:
        """Whether `command` asks for what is loaded; chunks of another size change no weight."""
        mine, theirs = (
            (
                *(one.path, one.adapter, one.digest, one.lo, one.hi, one.context, one.kv_bits),
                *(one.prompt_lo, one.prompt_hi),
                *(one.rank, one.ranks, one.draft, one.mtp, one.vision, *one.taps),
            )
            for one in (self.command, command)
        )
        return mine == theirs

    @property
    def patience(self) -> float:
        """As `warm_up.patience`."""
        return patience(self.times, self.command.prefill_chunk)

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of cache per token of a row, and per row whatever its length."""
        asked = self.command
        return kv_bytes(self.measured, asked.lo, _end(asked), asked.context, asked.prefill_chunk)

    @property
    def mark_bytes(self) -> int:
        """Bytes of one mark of a kept prefix; 0 where caches can be cut anywhere."""
        asked = self.command
        if self.prefixes.cuts:
            return 0
        return mark_bytes(self.measured, asked.lo, _end(asked), asked.context)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, each once."""
        kept = {id(array): array for stage in (self.stage, self.stage.prefill) for array in stage.kept}
        return sum(array.nbytes for array in kept.values())

    def draft_runs(self, stages: int) -> int:
        """As `Stage.draft_runs`."""
        return self.stage.draft_runs(stages)

    def draft_bytes(self, runs: int) -> int:
        """Bytes that the drafts of a row take besides its caches if `runs` runs can be taken back."""
        asked = self.command
        return draft_bytes(self.measured, asked.lo, asked.hi, asked.context, runs)

    def message(self, number: int) -> engine.StageLoaded:
        per_token, per_row = self.kv_bytes
        return engine.StageLoaded(
            id=number,
            weight_bytes=self.weight_bytes,
            kv_bytes_per_token=per_token,
            kv_bytes_per_row=per_row,
            prefixes=support(self.stage.prefill.make_cache()),
            prompts_alone=self.stage.prefill is not self.stage,
            mark_bytes=self.mark_bytes,
            times=self.times,
            metal=device.metal(),
            device=device.identity(),
            capabilities=self.front.inputs.capabilities if self.front is not None else (),
            vision_not_installed=self.front is not None and self.front.inputs.vision_not_installed,
            own=model.ModelCard(**self.front.inputs.own) if self.front is not None else None,
            sources=self.sources.facts,
            caches=self.layout.origin if self.layout is not None else b"",
        )

    def open_disk(
        self, asked: engine.PrefixDisk | None, bring: Callable[[engine.BringBlocks], None]
    ) -> Disk | None:
        """The disk of an epoch's prefixes; None where none is named, or where these caches are not stored.
        `bring` asks the daemon for what other members have.

        That of the epoch before goes on: its folder need not be read again, and what it still holds in memory
        to be written stays bounded.
        """
        if self.prefixes.disk is not None and asked == self.stored_at:
            return self.prefixes.disk
        self.close_disk()
        if asked is None or self.layout is None:
            return None
        from sealring.node.engine.disk import Disk  # here alone: it brings the cryptography
        from sealring.node.stored.keys import expand
        from sealring.node.stored.parts import former_of
        from sealring.node.stored.store import Store

        size = asked.size if asked.HasField("size") else None
        key = expand(asked.key, self.layout.digest)
        store = Store(Path(asked.root), Path(asked.model), key, size)
        former = former_of(asked, self.layout.table, self.command.lo)
        self.prefixes.disk, self.stored_at = Disk(self.layout, store, former, bring), asked
        return self.prefixes.disk

    def close_disk(self) -> None:
        """Ends the threads of the disk."""
        disk, self.prefixes.disk = self.prefixes.disk, None
        if disk is not None:
            disk.close()

    def free(self) -> None:
        """Gives the weights' memory back; the stage is of no use afterwards."""
        if self.front is not None:
            self.front.stop()
        if self.grammars is not None:
            self.grammars.close()
        self.close_disk()
        self.prefixes.clear()
        self.sources, self.tower = Sources(), None
        del self.stage
        gc.collect()
        mx.clear_cache()


def load(command: engine.LoadStage, emit: Emit, wake: Callable[[], None] = lambda: None) -> Loaded:
    """Loads what `command` asks for, with progress events. `wake` has the compute loop ask for work that can
    wait; any thread calls it. Raises ModelError, InvalidInput."""
    path = Path(command.path).resolve()  # once: a link that is changed meanwhile leads to another model
    adapter = Path(command.adapter) if command.adapter else None
    check_digest(path, command.digest, adapter)
    stage: Stage | None = None
    if command.ranks > 1:  # which an adapter excludes
        measured = with_kv_bits(profile(path, command.ranks), command.kv_bits)
        is_tail = command.rank == command.ranks - 1
    else:
        measured, stage = _cut(path, adapter, command)
        is_tail = stage.spec.is_tail
    words = measured["vocab_size"]
    if stage is not None and stage.pools:  # of which plans know the vector's length alone
        words = stage.model.args.vocab_size
    with ExitStack() as undo:
        front, grammars, wait_loaded = _readers(path, command, words, emit, is_tail=is_tail, undo=undo)
        stage = _with_weights(path, command, stage, _progress(command.id, emit))
        emit(engine.EngineEvent(progress=engine.LoadProgress(id=command.id, what=WARMING)))
        try:
            longest = max(1, command.prefill_chunk)
            times = _tried(stage, path.name, longest, max(_LEAST_ROWS, command.max_rows))
            sampling_kinds.warm_up(stage)
            sources = load_sources(path, command, stage, words, wake)
            tower = _tower(path, stage) if _sees(command) else None
        except (RuntimeError, ValueError) as error:
            raise not_runnable(stage.spec.model_type, error) from error
        wait_loaded()
        if front is not None and tower is None:
            front.inputs.blind()
        undo.pop_all()
    log.info("stage_loaded", lo=command.lo, hi=command.hi, weight_bytes=stage.weight_bytes)
    layout = _layout(stage.prefill, path, adapter)
    return Loaded(stage, front, command, measured, grammars, times, layout, sources, tower)


def _end(command: engine.LoadStage) -> int:
    """The end of the layers that are held from `lo` on."""
    return max(command.hi, command.prompt_hi)


def _tried(stage: Stage, name: str, longest: int, rows: int) -> list[control.StepTime]:
    """The times of a stage's steps, once it and what computes its prompts are checked and warm."""
    times: list[control.StepTime] = []
    prefill = stage.prefill
    for each in (stage, prefill) if isinstance(prefill, Prefill) else (stage,):
        check_weights(each, name)
        check_calls(each, name, longest)
        warm_up(each, longest)
        found = timed(each, longest, rows)
        times = [
            *(one for one in times if one.tokens == 1),
            *(one for one in found if each is stage or one.tokens > 1),
        ]
    if isinstance(prefill, Prefill):
        prefill.pair(stage)
    return times


def _sees(command: engine.LoadStage) -> bool:
    return command.vision and _is_head(command) and command.ranks <= 1


def _is_head(command: engine.LoadStage) -> bool:
    return command.lo == 0 and command.rank == 0


def _readers(
    path: Path, command: engine.LoadStage, words: int, emit: Emit, *, is_tail: bool, undo: ExitStack
) -> tuple[Front | None, Grammars | None, Callable[[], object]]:
    """The front at the head, grammars there and at the tail, and what waits until they have read the
    tokenizer, which they do meanwhile. `undo` ends their threads."""
    if _is_head(command):
        front = Front(path, command.context, words, emit, FolderSight(path, sees=_sees(command)))
        undo.callback(front.inputs.grammars.close)
        undo.callback(front.stop)
        return front, front.inputs.grammars, front.reader.wait_loaded
    if not is_tail:
        return None, None, lambda: None
    grammars = Grammars(partial(load_tokenizer, path, chats=False), words)
    undo.callback(grammars.close)
    return None, grammars, grammars.begin().result


def _with_weights(
    path: Path, command: engine.LoadStage, stage: Stage | None, progress: Callable[[int, int], None]
) -> Stage:
    """The stage with its weights; a rank's of a tensor ring if there is none yet."""
    if stage is None:
        check_whole(path)
        place = command.rank, command.ranks
        return load_shard(path, *place, kv_bits=command.kv_bits, progress=progress)
    check_here(path, command.lo, _end(command))
    read_weights(stage, path, progress)
    return stage


def _tower(path: Path, stage: Stage) -> Tower | None:
    """The vision tower of the model at `path`, in front of its first stage; None if it cannot be used, so
    that prompts without images are served all the same.

    Raises ModelError (WEIGHTS_CORRUPT).
    """
    try:
        tower = load_tower(path, *embedded(stage.model)) if can_see(read_config(path)) else None
        if tower is not None:
            stage.prefill.take_images(tower.residuals)
    except SealringError as error:
        log.warning("vision_tower_unusable", model=path.name, reason=error.reason, error=error.message)
        return None
    if tower is not None:
        read_arrays(path, tower.kept)
        log.info("vision_tower_loaded", weight_bytes=tower.weight_bytes)
    return tower


def _layout(stage: Stage, path: Path, adapter: Path | None) -> BlockLayout | None:
    """As `layout_of`; None if a model's own code does not make a token's caches alone, and for a GPU
    with memory of its own, whose caches no other thread can read."""
    try:
        return layout_of(stage, provenance(path, adapter)) if device.accelerator().shares_memory else None
    except Exception as error:
        log.info("prefixes_not_stored", model_type=stage.spec.model_type, error=type(error).__name__)
        return None


def _cut(path: Path, adapter: Path | None, command: engine.LoadStage) -> tuple[dict[str, Any], Stage]:
    """The profile and the stage of a model that is mapped and looked into once for both; a second time for
    other layers that compute prompts."""
    bits = command.kv_bits
    model, config = load_lazily(path, parts=True, adapter=adapter)
    anatomy = dissect(model, config["model_type"])
    measured = with_kv_bits(measure(path, model, config, anatomy, adapter), bits)
    stage = cut_stage(model, anatomy, command.lo, command.hi, bits)
    if command.prompt_hi:
        again, _ = load_lazily(path, parts=True, adapter=adapter)
        layers = command.prompt_lo, command.prompt_hi
        prefill = cut_stage(again, dissect(again, config["model_type"]), *layers, bits, Prefill)
        share(prefill, stage)
        stage.prefill = prefill
    return measured, stage


def profile_message(path: str, ranks: int = 1, adapter: str = "") -> model.ModelProfile:
    """The profile of a folder as the daemon wants it; `adapter` is the folder of an adapter, if there is one.

    Raises ModelError, also without a tokenizer.
    """
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{Path(path).name} has no tokenizer",
            reason="TOKENIZER_MISSING",
            hint="a model folder holds tokenizer.json or tokenizer.model beside its weights",
        )
    measured = profile(Path(path), ranks, Path(adapter) if adapter else None)
    del measured["eos_token_ids"]
    measured["kv_max_tokens"] = [tokens or 0 for tokens in measured["kv_max_tokens"]]
    measured["max_context"] = measured["max_context"] or 0
    measured["quantized"] = [model.QuantizedCaches(**one) for one in measured["quantized"]]
    made = model.ModelProfile(**measured)
    say_singly(made, "card")
    return made


def draft_message(path: str, draft: str) -> model.ModelProfile:
    """The profile of the folder `draft`, whose model is to guess for that at `path`.

    Of a drafter that reads hidden states it has what a tail holds. Raises ModelError (also DRAFT_NOT_ALIKE,
    DRAFT_NOT_REVERSIBLE, DRAFT_TAPS_UNKNOWN).
    """
    if kind_of(read_config(Path(draft))) is not None:
        return drafter_message(Path(path), Path(draft))
    check_alike(Path(path), Path(draft))
    model_of_it, _ = load_lazily(Path(draft), parts=True)
    if not can_go_back(full_cache(model_of_it)):
        raise cannot_go_back(Path(draft).name)
    return profile_message(draft)


def ranges_message(path: str, lo: int, hi: int) -> list[engine.FileRange]:
    """The bytes of a folder's files that the layers [lo, hi) need. Raises ModelError."""
    return [
        engine.FileRange(name=name, first=first, end=end) for name, first, end in needed(Path(path), lo, hi)
    ]


def _progress(number: int, emit: Emit) -> Callable[[int, int], None]:
    """Reports the bytes of a load that are read to the daemon, at most every `_PROGRESS_SECONDS`."""
    next_at = time.monotonic() + _PROGRESS_SECONDS

    def progress(done: int, total: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            told = engine.LoadProgress(id=number, what=LOADING, done=done, total=total)
            emit(engine.EngineEvent(progress=told))
            next_at = time.monotonic() + _PROGRESS_SECONDS

    return progress
