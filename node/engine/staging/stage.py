"""A stage: the model's own code, run on the layers [lo, hi) only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import Internal, InvalidInput, ModelError
from sealring.mesh.ring.limits import MAX_RUNS
from sealring.node.engine import device
from sealring.node.engine.caches import Batch, Cache, OneRow, RowByRow, for_one_row, parts_of, trimmable
from sealring.node.engine.caches.undo import repeats, runs_of
from sealring.node.engine.staging.grid import attends_both_ways, has_three

from .adapters import Followed
from .anatomy import Anatomy, Boundary, full_cache, not_stageable, outer_modules, recorded_updates
from .both_ways import BothWays
from .interception import Call, intercept_call, leaves, own_arrays
from .layout import TOKENS, Arguments, StageSpec, TensorSpec, get_argument, set_argument
from .mrope import MRope, Positions, mrope_of
from .quantization import CacheQuantization
from .slots import Slots


class _HandedOn(BaseException):
    """Ends a model's call in front of the layers of the next stage.

    A BaseException, so that no handler in a model's code takes it for an error.
    """


class Stage:
    """The layers [lo, hi) of a model, run by the model's own `__call__`.

    Layers before `lo` are skipped, layer `lo` gets the state of the stage before, and the call ends at layer
    `hi`. On a stage that is not the head, MLX does not evaluate the model's work before its layers (an
    embedding, its scale, positions), because nothing depends on it. Parameters that the stage does not use
    are NaN without storage, so that a mistake shows at once.

    Not for use by several threads at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        lo: int,
        hi: int,
        *,
        quantization: CacheQuantization | None = None,
    ) -> None:
        """Takes the model over: its layers are intercepted and its other parameters dropped.

        `quantization` is how its caches are kept. Raises InvalidInput for an impossible range, ModelError
        for a part of a model that does not split.
        """
        _check_layers(anatomy, lo, hi)
        if anatomy.adapter.together:
            anatomy.adapter.together(model)
        self.model = model
        self.spec = _spec(anatomy, lo, hi)
        self.prefill: Stage = self
        """The stage that computes prompts; another one where layers are doubled (`doubled`)."""
        self.kept = _prune(model, anatomy, lo, hi)
        self._anatomy = anatomy
        self._step = _Step()
        self._mrope: MRope | None = None
        self._placed = False
        args = getattr(model, "args", None)
        self._both_ways = attends_both_ways(
            {"model_type": anatomy.model_type, "text_config": getattr(args, "text_config", None)}
        )
        self._slots = Slots(full_cache(model), anatomy.owners, anatomy.idle, lo, hi)
        self.quantization = quantization
        self.awaits_input = True
        """Whether a step's input has to arrive before the stage is called, because its code evaluates arrays.
        True until a trial shows otherwise (`node/engine/warm_up.py`)."""
        self.cuts = False
        """Whether `last_logits` makes the last token's logits only. False until a trial shows that they are
        the same (`node/engine/warm_up.py`)."""
        self.batches = anatomy.adapter.batches
        """Whether rows are computed together. False if a trial on a GPU shows that they then differ from rows
        alone (`node/engine/warm_up.py`)."""
        self.gpu_code = anatomy.adapter.gpu_code
        """Whether only such a trial can show whether rows batch."""
        self._last: int | None = None
        self.hidden: list[mx.array] | None = None
        """At a tail whose hidden states are wanted: what the last layer, or the tapped layers in its place,
        returned in each call, which may be padded."""
        self.tapping = False
        """Whether calls bring and hand on what the tapped layers of the stages before return."""
        self._taps: Sequence[int] = ()
        self.computed_as = device.accelerator().computed_as
        """The number of tokens that a chunk is padded to, from its own number."""
        self._can_pad = trimmable(self.make_cache())
        self.positions = _positions(model)
        """Tokens for which the model is sure to have positions."""
        self._followed = {donor for reader, donor in anatomy.donors.items() if donor < lo <= reader < hi}
        self._recorded = sorted(
            {donor for reader, donor in anatomy.donors.items() if lo <= donor < hi <= reader}
        )
        self._intercept_layers(lo, hi)
        self._to_see = self._expected()

    def _expected(self) -> list[int]:
        """The layers whose calls a step has to pass through, in order, of those that stand at an end of the
        stage."""
        spec, first = self.spec, [self.spec.lo] if self.spec.lo else []
        if spec.is_tail:
            return [*range(spec.lo), *first, spec.layers - 1]
        to_end = spec.is_head and self._anatomy.boundaries[spec.hi].per_layer is not None
        return [*range(spec.lo), *first, *range(spec.hi, spec.layers if to_end else spec.hi + 1)]

    def _intercept_layers(self, lo: int, hi: int) -> None:
        """Has the model's own call skip the layers before the stage, take its input and end behind it."""
        layers, adapter = self._anatomy.layers, self._anatomy.adapter
        for index, layer in enumerate(layers):
            if index < lo:
                intercept_call(layer, self._skip(index))
            elif index >= hi:
                intercept_call(layer, self._hand_on(index))
            elif lo > 0 and (index == lo or adapter.every_layer or adapter.per_layer):
                intercept_call(layer, self._take_over(index))
        if hi == len(layers):
            intercept_call(layers[-1], self._cut)

    def take_images(self, residuals: int = 0) -> None:
        """Has a head take rows of images beside tokens, once, before the first call.

        From then on `inputs` may be longer: which tokens have rows, bool [rows, tokens], the rows [rows,
        tokens, width], and `residuals` further arrays of that shape, each added to the output of a layer from
        the first on. Raises ModelError (VISION_UNSUPPORTED) for a model without an embedding to be found, or
        whose positions are not known, and for a head of fewer layers.
        """
        if residuals > self.spec.hi:
            raise ModelError(
                f"images need the first {residuals} layers at the head, which has {self.spec.hi}",
                hint="give the head more layers",
                reason="VISION_UNSUPPORTED",
            )
        if has_three(self.spec.model_type) or self._both_ways:
            self._take_places()
        self._anatomy.adapter.splices(self.model, self._splice)
        for index in range(residuals):
            intercept_call(self._anatomy.layers[index], self._add(index))

    def _take_places(self) -> None:
        """Has the stage's layers take positions in three dimensions, or masks that see images in both
        directions, once, before the first row that has images. Raises ModelError (VISION_UNSUPPORTED)."""
        layers = self._anatomy.layers[self.spec.lo : self.spec.hi]
        if self._both_ways and self._anatomy.adapter.mask is not None:
            for layer in layers:
                intercept_call(layer, self._see)
            self._placed = True
            return
        ropes = [
            module
            for layer in layers
            for name, module in layer.named_modules()
            if name.rpartition(".")[2] == "rope"
        ]
        for rope in ropes:
            made = mrope_of(self.model, self.spec.model_type, rope)
            self._mrope = self._mrope or made
        self._placed = True
        for rope in ropes:
            intercept_call(rope, self._rotate)

    def _see(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """A layer of a model that sees images in both directions."""
        place, both_ways = self._anatomy.adapter.mask, self._step.both_ways
        arguments = (list(args), kwargs)
        if place is not None and both_ways is not None:
            set_argument(arguments, place, both_ways.mask(get_argument(arguments, place)))
        return original(*arguments[0], **arguments[1])

    def _rotate(self, original: Call, array: mx.array, *args: Any, offset: Any = 0) -> Any:
        """A layer's rotary embedding, of queries or keys."""
        step, positions = self._step, self._step.positions
        if positions is None or self._mrope is None:
            return original(array, *args, offset=offset)
        if step.angles is None:  # all layers hold as many tokens
            step.angles = self._mrope.angles(positions.at(offset, array.shape[2]), array.dtype)
        rotated = self._mrope(array, step.angles)
        if (seen := positions.seen) is None:
            return rotated
        return mx.where(seen[:, None, None, None], rotated, original(array, *args, offset=offset))

    def _splice(self, embedded: mx.array) -> mx.array:
        if not self._step.images:
            return embedded
        there, rows, *_ = self._step.images
        return mx.where(there[..., None], rows, embedded)

    def _add(self, index: int) -> Call:
        def call(original: Call, *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            return output + self._step.images[2 + index] if self._step.images else output

        return call

    def draft_runs(self, stages: int) -> int:
        """The number of runs of drafts that can be taken back, as `runs_of`; of a lane there is one for each
        of its rows."""
        runs = runs_of(self.make_cache(), stages, self._anatomy.adapter.steps_alike)
        return max(runs, MAX_RUNS) if runs and self.drafts_together else runs

    @cached_property
    def drafts_together(self) -> bool:
        """Whether drafts of several rows of a lane can be taken back: where caches are cut, or where the run
        is computed again with states that know how many tokens of each row count."""
        empty = self.make_cache()
        return trimmable(empty) or (self._anatomy.adapter.masks_states and repeats(empty))

    @property
    def pools(self) -> bool:
        """Whether the model ends with a vector in place of logits (`pooling`)."""
        return hasattr(self.model, "pooling")

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters that the stage keeps."""
        return sum(array.nbytes for array in self.kept)

    @property
    def caches_by_layer(self) -> bool:
        """Whether `make_cache` has one cache for each layer, in order, and others only behind these."""
        return self._slots.by_layer

    def make_cache(self) -> Cache:
        """Empty caches for one row. Merge, extend, filter and extract them with `engine.caches`."""
        own = self._slots.select(full_cache(self.model))
        if self.quantization is not None:
            own = [
                self.quantization.new_cache(cache) if self._slots.is_present(place) else cache
                for place, cache in enumerate(own)
            ]
        return for_one_row(own, self.batches)

    @property
    def cache_places(self) -> list[int]:
        """Which of the model's caches those of `make_cache` are, the shadows behind them left out."""
        return self._slots.present

    @property
    def places_by_layer(self) -> list[int]:
        """The places in `make_cache` of its caches, those of layers first, in the order of these."""
        return list(range(len(self.make_cache())))

    @property
    def held(self) -> tuple[int, int]:
        """The layers of which a row has caches here."""
        return self.spec.lo, self.spec.hi

    def tried(self, tokens: int) -> Cache:
        """A row's caches after as many tokens, whose inputs are zeros; lazy."""
        cache = self.make_cache()
        token = [mx.zeros((1, 1, *each.tail), getattr(mx, each.dtype)) for each in self.spec.receives]
        for _ in range(tokens):
            self(token, cache)
        return cache

    def caches_of(self, lo: int, hi: int) -> list[int]:
        """Which of the model's caches the layers [lo, hi) use."""
        return self._slots.used(lo, hi)

    def count_shadows(self, shadows: Cache, rows: int, tokens: int) -> None:
        """Lets shadows of this stage, which was not called, count a step's tokens."""
        self._slots.count_in(shadows, rows, tokens)

    def __call__(
        self, inputs: list[mx.array], cache: Batch, positions: Positions | None = None
    ) -> list[mx.array]:
        """Runs the layers on arrays as `spec.receives` says and returns arrays as `spec.hands_on` says.

        All arrays are [rows, tokens, ...] and lazy; the cache is updated in place. `positions` are those of
        rows that have images, in a model whose positions have three dimensions. Raises ModelError
        (VISION_UNSUPPORTED) for positions that the model does not have.
        """
        if positions is not None and not self._placed:
            self._take_places()
        if not isinstance(cache, RowByRow):
            return self._run_padded(inputs, cache, positions)
        outputs = [
            self._run([array[row : row + 1] for array in inputs], one, positions and positions.row(row))
            for row, one in enumerate(cache)
        ]
        return [mx.concatenate(list(arrays)) for arrays in zip(*outputs, strict=True)]

    def last_logits(
        self, inputs: list[mx.array], cache: Batch, positions: Positions | None = None
    ) -> mx.array:
        """Calls the tail; returns only the last token's logits, [rows, vocabulary].

        If the stage `cuts`, the last layer's output is cut to its last token. This saves the output head's
        product over all other tokens, and a further pass through all weights for the last token alone.
        """
        if self.cuts:
            self._last = inputs[0].shape[1] - 1
        try:
            return self(inputs, cache, positions)[0][:, -1, :]
        finally:
            self._last = None

    def _cut(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """The last layer."""
        self._step.seen.append(self.spec.layers - 1)
        output = original(*args, **kwargs)
        if self.hidden is not None and not self._taps:
            self.hidden.append(output[0] if isinstance(output, tuple) else output)
        if self._last is None:
            return output
        if isinstance(output, tuple):
            return tuple(self._token(part) for part in output)
        return self._token(output)

    def tap(self, layers: Sequence[int]) -> None:
        """Has what these layers of the model return, which rise, travel to the tail in calls with `tapping`,
        once, before the first call. Raises ModelError (DRAFT_TAPS_UNKNOWN) for a model whose layers return
        more than a hidden state, or that has no such layer."""
        spec = self.spec
        form = tap_form(self._anatomy, layers)
        before, behind = (sum(layer < edge for layer in layers) for edge in (spec.lo, spec.hi))
        tensors = [TensorSpec("taps", form.dtype, (count, *form.tail)) for count in (before, behind)]
        taken = [(one,) if one.tail[0] else () for one in tensors]
        self.spec = dataclasses.replace(spec, taps=(taken[0], () if spec.is_tail else taken[1]))
        self._taps = [layer for layer in layers if layer < spec.hi]
        for layer in layers:
            if spec.lo <= layer < spec.hi:
                intercept_call(self._anatomy.layers[layer], self._note)

    def _note(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """A tapped layer."""
        output = original(*args, **kwargs)
        if self.tapping:
            self._step.taps.append((output[0] if isinstance(output, tuple) else output)[:, :, None])
        return output

    def _split(self, inputs: list[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
        """What a call is given, and what tapped layers before this stage returned."""
        if not self.tapping or not self.spec.taps[0]:
            return inputs, []
        if len(inputs) == len(self.spec.receives):
            raise Internal("a step came without what tapped layers returned", reason="TAPS_MISSING")
        return inputs[:-1], inputs[-1:]

    def _with_taps(self, outputs: list[mx.array], taps: list[mx.array]) -> list[mx.array]:
        """The arrays that a call hands on. The tail notes what is tapped for its drafter, [rows, tokens,
        layers x width]."""
        if not self.tapping or not taps:
            return outputs
        joined = mx.concatenate(taps, axis=2)
        if not self.spec.is_tail:
            return [*outputs, joined]
        if self.hidden is not None:
            self.hidden.append(joined.flatten(2))
        return outputs

    def _token(self, output: Any) -> Any:
        at = self._last
        if at is None or not isinstance(output, mx.array) or output.ndim < 3 or output.shape[1] <= at:
            return output
        return output[:, at : at + 1]

    def _run_padded(
        self, inputs: list[mx.array], cache: Cache, positions: Positions | None
    ) -> list[mx.array]:
        """Runs the layers on tokens padded as the device wants it. No token sees those behind it, and the
        added ones leave the caches again."""
        rows, tokens = inputs[0].shape[:2]
        more = self.computed_as(tokens) - tokens
        if rows > 1 or not more or not self._can_pad or isinstance(cache, OneRow):
            return self._run(inputs, cache, positions)
        parts = [part for entry in cache for part in parts_of(entry)]
        held = [int(part.offset) for part in parts]
        if max(held, default=0) + tokens + more > self.positions:
            return self._run(inputs, cache, positions)
        longer = [mx.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)]) for array in inputs]
        outputs = self._run(longer, cache, positions)
        for part, before in zip(parts, held, strict=True):
            part.trim(max(0, int(part.offset) - before - tokens))
        return [array[:, :tokens] for array in outputs]

    def _run(self, inputs: list[mx.array], cache: Cache, positions: Positions | None) -> list[mx.array]:
        rows, tokens = inputs[0].shape[:2]
        inputs, taps = self._split(inputs)
        token_ids = inputs[0] if self.spec.lo == 0 else mx.zeros((rows, tokens), mx.uint32)
        arrived, images = ([], inputs[1:]) if self.spec.lo == 0 else (inputs, [])
        if images:  # as in mlx-vlm; some models make more of tokens than an embedding
            token_ids = mx.where(images[0], 0, token_ids)
        step = self._step = _Step(arrived, images, self._slots.spread(cache), positions)
        step.taps += taps
        if self._both_ways and positions is not None:
            step.both_ways = _both_ways(positions, cache, tokens)
        with contextlib.ExitStack() as recording:
            updates = {
                donor: recording.enter_context(recorded_updates(self._cache_of(donor)))
                for donor in self._recorded
            }
            try:
                outputs = [self.model(token_ids, cache=step.caches)]
            except _HandedOn:
                outputs = self._outputs(updates)
            finally:
                self._step = _Step()
        if step.seen != self._to_see and not (self.spec.is_head and self.spec.is_tail):
            raise not_stageable(
                self.spec.model_type, f"a step went through the layers {step.seen} at its ends"
            )
        self._slots.count(cache, rows, tokens)
        return self._with_taps(outputs, step.taps)

    def _cache_of(self, layer: int) -> Any:
        return self._step.caches[self._anatomy.cache_of(layer)]

    def _skip(self, index: int) -> Call:
        """A layer of an earlier stage: passes its state on, and fills its cache if a present layer reads
        it."""

        def call(_: Call, *args: Any, **kwargs: Any) -> Any:
            self._step.seen.append(index)
            followed = None
            if index in self._followed:
                cache = self._cache_of(index)
                offset = mx.array(cache.offset)
                keys, values = self._arrived_keys_values(index)
                followed = Followed(cache.update_and_fetch(keys, values), offset)
            return self._anatomy.adapter.passed((list(args), kwargs), followed)

        return call

    def _take_over(self, index: int) -> Call:
        """A present layer on the state that arrived: the first takes the state, each its own argument."""
        boundary = self._anatomy.boundaries[self.spec.lo]

        def call(original: Call, *args: Any, **kwargs: Any) -> Any:
            arguments = (list(args), kwargs)
            adapter = self._anatomy.adapter
            arrived = {
                place: layout.from_wire(array)
                for (place, layout), array in zip(boundary.state, self._step.arrived, strict=False)
            }
            if index == self.spec.lo:
                self._step.seen.append(index)
                adapter.resume(self.model, index, arguments, arrived)
            else:
                for place in adapter.every_layer:
                    set_argument(arguments, place, arrived[place])
            if boundary.per_layer is not None and adapter.per_layer is not None:
                each = self._step.arrived[-1][:, :, index - self.spec.lo]
                set_argument(arguments, adapter.per_layer, each)
            return original(*arguments[0], **arguments[1])

        return call

    def _hand_on(self, index: int) -> Call:
        """A layer of a later stage: notes its arguments, and ends the call when they are complete."""
        ends = index == len(self._anatomy.layers) - 1 or (
            self._anatomy.boundaries[self.spec.hi].per_layer is None or not self.spec.is_head
        )

        def call(_: Call, *args: Any, **kwargs: Any) -> Any:
            arguments = (list(args), kwargs)
            self._step.seen.append(index)
            self._step.next_arguments.append(arguments)
            if ends:
                raise _HandedOn
            return self._anatomy.adapter.passed(arguments, None)

        return call

    def _outputs(self, updates: dict[int, list[tuple[mx.array, mx.array]]]) -> list[mx.array]:
        """The state that crosses the boundary at `hi`, in the order of `Boundary`."""
        boundary, step, adapter = self._anatomy.boundaries[self.spec.hi], self._step, self._anatomy.adapter
        constant = () if self.spec.is_head else adapter.every_layer
        found = adapter.handed_on(self.model, self.spec.hi, step.next_arguments[0])
        handed_on = dict(zip(adapter.state, found, strict=True))
        outputs = [
            step.arrived[number] if place in constant else layout.to_wire(handed_on[place])
            for number, (place, layout) in enumerate(boundary.state)
        ]
        for donor, keys_layout, values_layout in boundary.donors:
            keys, values = updates[donor][0] if donor in updates else self._arrived_keys_values(donor)
            outputs += [keys_layout.to_wire(keys), values_layout.to_wire(values)]
        if boundary.per_layer is not None:
            outputs.append(self._per_layer_outputs())
        return outputs

    def _per_layer_outputs(self) -> mx.array:
        place = self._anatomy.adapter.per_layer
        assert place is not None
        if not self.spec.is_head:
            return self._step.arrived[-1][:, :, self.spec.hi - self.spec.lo :]
        return mx.stack([get_argument(arguments, place) for arguments in self._step.next_arguments], axis=2)

    def _arrived_keys_values(self, donor: int) -> tuple[mx.array, mx.array]:
        boundary: Boundary = self._anatomy.boundaries[self.spec.lo]
        number = next(i for i, (layer, _, _) in enumerate(boundary.donors) if layer == donor)
        start = len(boundary.state) + 2 * number
        _, keys, values = boundary.donors[number]
        arrived = self._step.arrived
        return keys.from_wire(arrived[start]), values.from_wire(arrived[start + 1])


class _Step:
    """One call of a stage under way."""

    def __init__(
        self,
        arrived: Sequence[mx.array] = (),
        images: Sequence[mx.array] = (),
        caches: Sequence[Any] = (),
        positions: Positions | None = None,
    ) -> None:
        self.arrived = arrived
        self.images = images
        self.caches = caches
        self.positions = positions
        self.angles: tuple[mx.array, mx.array] | None = None
        self.both_ways: BothWays | None = None
        self.next_arguments: list[Arguments] = []
        self.seen: list[int] = []
        """The layers at the stage's ends that were called."""
        self.taps: list[mx.array] = []
        """What tapped layers returned, as it travels."""


def _both_ways(positions: Positions, cache: Cache, tokens: int) -> BothWays | None:
    """For the masks of a call in which there are images; None for others."""
    held = parts_of(cache[0])[0].offset
    if isinstance(held, mx.array):  # a lane's, which has no image before it: these are prefilled one by one
        return None
    images = positions.images(int(held), tokens)
    return None if images is None else BothWays(images, int(held))


def _positions(model: nn.Module) -> int:
    """The number of tokens for which a model is sure to have positions."""
    args = getattr(model, "args", None)
    found = [getattr(args, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx")]
    return min((one for one in found if isinstance(one, int)), default=1 << 40)


def _check_layers(anatomy: Anatomy, lo: int, hi: int) -> None:
    """Raises InvalidInput for an impossible range, ModelError for a part of a model that does not split."""
    count = len(anatomy.layers)
    if not 0 <= lo < hi <= count:
        raise InvalidInput(
            f"no stage can hold the layers [{lo}, {hi}) of {count}",
            hint="layer ranges are not empty and lie within the model",
            param="layers",
        )
    if anatomy.indivisible and (lo, hi) != (0, count):
        raise not_stageable(anatomy.model_type, anatomy.indivisible)
    if any(0 < cut < anatomy.head_layers for cut in (lo, hi)):
        raise InvalidInput(
            f"the layers [{lo}, {hi}) cut the first {anatomy.head_layers}, which read tokens",
            hint=f"give the head at least {anatomy.head_layers} layers",
            param="layers",
        )


def tap_form(anatomy: Anatomy, layers: Sequence[int]) -> TensorSpec:
    """What a layer returns, of which a drafter reads these. Raises as `Stage.tap`."""
    count = len(anatomy.layers)
    inside = layers and 0 <= min(layers) <= max(layers) < count - 1  # `cuts` leaves one token of the last
    if inside and anatomy.boundaries:
        _, layout = anatomy.boundaries[1].state[0]
        if (layout.rows, layout.tokens, len(layout.tail)) == (0, 1, 1):
            return layout.spec
    raise ModelError(
        f"a drafter cannot read the layers {list(layers)} of {anatomy.model_type}, which has {count}",
        reason="DRAFT_TAPS_UNKNOWN",
        hint="take the drafter that was made for this model and size",
    )


def _spec(anatomy: Anatomy, lo: int, hi: int) -> StageSpec:
    count = len(anatomy.layers)
    receives = anatomy.boundaries[lo].specs if lo else (TOKENS,)
    hands_on = anatomy.boundaries[hi].specs if hi < count else (anatomy.logits.spec,)
    return StageSpec(anatomy.model_type, count, lo, hi, receives, hands_on)


def _prune(model: nn.Module, anatomy: Anatomy, lo: int, hi: int) -> list[mx.array]:
    """Replaces every parameter that the layers [lo, hi) do not need by NaN without storage.

    Parameters outside the layers stay where the stage's part of the model's call reads them: before layer 0
    on the head, between and within the stage's layers, after the last layer on the tail. Returns those kept.
    """
    kept: dict[int, mx.array] = {}
    for index, layer in enumerate(anatomy.layers):
        for module in layer.modules():
            for key, value in own_arrays(module):
                _keep_or_drop(module, key, value, lo <= index < hi, kept)
    for module in outer_modules(model, anatomy.layers):
        for key, value in own_arrays(module):
            times = anatomy.uses.get((id(module), key), frozenset())
            needed = any(lo < time <= hi or (time == 0 and lo == 0) for time in times)
            _keep_or_drop(module, key, value, needed, kept)
    return list(kept.values())


def _keep_or_drop(module: nn.Module, key: str, value: Any, needed: bool, kept: dict[int, mx.array]) -> None:
    if needed:
        kept.update((id(leaf), leaf) for leaf in leaves(value) if isinstance(leaf, mx.array))
    else:
        module[key] = _absent(value)


def _absent(value: Any) -> Any:
    """A copy of the containers and shapes, without storage."""
    if isinstance(value, dict):
        return {key: _absent(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_absent(item) for item in value)
    if not isinstance(value, mx.array):
        return value
    nothing = float("nan") if mx.issubdtype(value.dtype, mx.floating) else 0
    return mx.broadcast_to(mx.array(nothing, value.dtype), value.shape)
