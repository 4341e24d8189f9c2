"""Results: what becomes of a stage's outputs. The tail samples; other members hand them on."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from sealring.mesh.errors import Internal
from sealring.mesh.ring.composition import Chunk, ResolvedStep
from sealring.node.engine import params, records
from sealring.node.engine.borders import Border
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts.tail import TailDrafter
from sealring.node.engine.grammar import Grammars
from sealring.node.engine.lanes import Lane, Row
from sealring.node.engine.logprobs import Asking, asking_of, scores
from sealring.node.engine.params import RowParameters
from sealring.node.engine.receipts import Sampled
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage
from sealring.node.engine.threads import StepTimes
from sealring.node.engine.transfer import SendBuffer, Transfer
from sealring.node.wire.channel import RecordHeader

from .exits import Exit, LinkExit
from .sources import Input, Source, bad_chunk

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are made at once for log-probabilities; those of a chunk would fill memory."""


class StageCall:
    """One call of a stage, with its input and its times."""

    def __init__(self, step: ResolvedStep, stage: Stage, given: Input, times: StepTimes) -> None:
        self.step = step
        self.input = given
        self.times = times
        self._stage = stage
        if given.buffer is None:
            times.fed = time.perf_counter()

    def wait(self) -> None:
        """Waits until the input has arrived.

        Raises Internal (EVALUATED_EARLY) if the graph that was built meanwhile has read the input before.
        """
        buffer = self.input.buffer
        if buffer is None or self.times.fed:
            return
        if self.times.built and buffer.evaluated:
            self._stage.awaits_input = True  # from the next epoch on
            raise Internal(
                f"a {self._stage.spec.model_type} stage evaluated a step's input before it had arrived",
                hint="the next epoch waits for inputs; report this: the check at load time missed it",
                reason="EVALUATED_EARLY",
            )
        self.input.arrive()
        self.times.fed = time.perf_counter()

    def built(self) -> None:
        """Notes that the graph is complete and waits for its input."""
        self.times.built = time.perf_counter()
        self.wait()


class Results(ABC):
    """One member's use of its stage's outputs. Used by the compute thread."""

    def __init__(self, stage: Stage, source: Source, way_out: Exit, transfer: Transfer) -> None:
        self._stage, self._prefill = stage, stage.prefill
        self._source = source
        self._exit = way_out
        self._transfer = transfer
        self._chunk: StepTimes | None = None

    def _next_chunk(self, times: StepTimes) -> None:
        """Waits until the device has computed the chunk before the one of these times.

        So a chunk's graph is built while the device computes the chunk before, and the device holds the
        intermediate results of one chunk at a time. Steps between them are not waited for.
        """
        if self._chunk is not None:
            self._exit.wait_for(self._chunk)
        self._chunk = times

    def watch(self, step: ResolvedStep) -> None:
        """The stage is about to be called for a step of rows in a lane."""
        self._stage.tapping = self._prefill.tapping = step.taps

    @abstractmethod
    def begin(self, step: ResolvedStep, chunk: Chunk, row: Row, record: bytes) -> None:
        """Takes the parameter record that a row's first chunk brings; b"" if there is none."""

    @abstractmethod
    def chunk(self, call: StageCall, row: Row, chunk: Chunk) -> mx.array | None:
        """Takes a chunk, whose input may still have to arrive: the logits of a prompt's last token,
        [1, vocabulary], if this member makes them."""

    @abstractmethod
    def first_tokens(
        self, step: ResolvedStep, prompts: Sequence[tuple[Row, mx.array]], times: StepTimes
    ) -> None:
        """Takes the rows whose prompts end in this step, with their logits."""

    def hand_over(self, step: ResolvedStep, chunk: Chunk, row: Row) -> None:  # noqa: B027
        """Hands on what doubled layers have computed of a chunk, once the step's chunks are launched."""

    @abstractmethod
    def decode(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        """Takes the outputs of a decode step; their input may still have to arrive."""

    @abstractmethod
    def verify(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        """Takes the outputs of a step with drafts, as `decode`."""


class HandingOn(Results):
    """Outputs that are the next member's input."""

    def __init__(
        self,
        stage: Stage,
        source: Source,
        link: LinkExit,
        transfer: Transfer,
        border: Border | None = None,
    ) -> None:
        """`border`: that with the next member."""
        super().__init__(stage, source, link, transfer)
        self._link = link
        self._border = border

    def begin(self, step: ResolvedStep, chunk: Chunk, row: Row, record: bytes) -> None:
        if record:
            self._link.pass_on(records.params_record(step, chunk), record)

    def chunk(self, call: StageCall, row: Row, chunk: Chunk) -> None:
        self._stage.tapping = self._prefill.tapping = chunk.taps
        results = self._transfer.send_buffer(self._prefill(call.input.arrays, row.cache, row.positions))
        header = records.state_record(call.step, self._prefill.spec.handing_on(chunk.taps), 1, chunk.tokens)
        call.built()
        self._next_chunk(call.times)
        self._launch(call, header, results, row.cache)

    def hand_over(self, step: ResolvedStep, chunk: Chunk, row: Row) -> None:
        if self._border is None:
            return
        times = StepTimes(step.number, time.perf_counter())
        results = self._transfer.send_buffer(self._border.content(row.cache, chunk))
        launch(results.pending)
        times.built = times.fed = times.launched = time.perf_counter()
        self._link.send(self._border.record(step, chunk), results, times)

    def first_tokens(
        self, step: ResolvedStep, prompts: Sequence[tuple[Row, mx.array]], times: StepTimes
    ) -> None: ...

    def decode(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        self._hand_on(call, outputs, self._header(call.step, len(call.step.rows), 1))

    def verify(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        self._hand_on(call, outputs, self._header(call.step, len(call.step.rows), 1 + call.step.drafts))

    def _header(self, step: ResolvedStep, rows: int, tokens: int) -> RecordHeader:
        tensors = self._stage.spec.handing_on(self._stage.tapping)
        return records.state_record(step, tensors, rows, tokens)

    def _hand_on(self, call: StageCall, outputs: list[mx.array], header: RecordHeader) -> None:
        results = self._transfer.send_buffer(outputs)
        call.built()
        self._launch(call, header, results, [])

    def _launch(self, call: StageCall, header: RecordHeader, results: SendBuffer, caches: Cache) -> None:
        launch(results.pending, states(caches))
        call.times.launched = time.perf_counter()
        self._source.launched(call.step, None)
        self._link.send(header, results, call.times)


class Logits(Results):
    """Outputs that are logits."""

    def chunk(self, call: StageCall, row: Row, chunk: Chunk) -> mx.array | None:
        if chunk.last:
            return self._last_logits(call, row, chunk)
        self._fill(call, call.input.arrays, row, chunk)
        return None

    def _last_logits(self, call: StageCall, row: Row, chunk: Chunk) -> mx.array:
        """Logits of the last token only: the output head's product over the others takes time and memory."""
        inputs = call.input.arrays
        scored = row.parameters is not None and row.parameters.scored
        if inputs[0].shape[1] > 1 and (scored or not self._prefill.cuts):
            self._fill(call, [array[:, :-1] for array in inputs], row, chunk)
            inputs = [array[:, -1:] for array in inputs]
        logits = self._prefill.last_logits(inputs, row.cache, row.positions)
        call.built()
        return logits

    def _fill(self, call: StageCall, inputs: list[mx.array], row: Row, chunk: Chunk) -> None:
        """Runs tokens into the caches; makes logits only if the prompt's log-probabilities are asked for.

        `call.times` are those of the remaining work afterwards.
        """
        if row.parameters is not None and row.parameters.scored:
            call.wait()
            self._score(inputs, row, row.parameters, chunk)
        else:
            self._prefill(inputs, row.cache, row.positions)
        filled = self._transfer.send_buffer([behind(states(row.cache))])
        call.built()
        self._next_chunk(call.times)
        launch(filled.pending)
        call.times.launched = time.perf_counter()
        self._exit.filled(filled, call.times)
        call.times = StepTimes(call.step.number, call.times.launched, fed=call.times.launched)

    def _hand_out(
        self, step: ResolvedStep, asking: Asking, tokens: mx.array, results: SendBuffer, times: StepTimes
    ) -> None:
        launch(tokens, results.pending)
        times.launched = time.perf_counter()
        self._source.launched(step, tokens)
        self._exit.tokens(step, asking, results, times)

    def _wait_for(self, *arrays: object) -> None:
        launch(*arrays)  # outside the wait: compiling a new kernel is no sign of a stuck device
        with self._exit.waits.one():
            mx.eval(*arrays)

    def _score(self, inputs: list[mx.array], row: Row, parameters: RowParameters, chunk: Chunk) -> None:
        """Adds the log-probabilities of the prompt's tokens to the row, a few tokens at a time."""
        for at in range(0, inputs[0].shape[1], SCORED_AT_ONCE):
            part = [array[:, at : at + SCORED_AT_ONCE] for array in inputs]
            logits = self._prefill(part, row.cache, row.positions)[0][0]
            following = chunk.start + at + 1
            tokens = parameters.scored[following : following + len(logits)]
            if len(tokens) != len(logits):
                raise bad_chunk(chunk)
            row.scores.append(scores(logits, tokens, parameters.logprobs or 0))
            self._wait_for(row.scores[-1], states(row.cache))


class Alike(Logits):
    """Logits at a rank of a tensor ring whose tail samples.

    They are evaluated because the tail evaluates its own, and each sum takes every rank.
    """

    def __init__(self, stage: Stage, source: Source, link: LinkExit, transfer: Transfer) -> None:
        super().__init__(stage, source, link, transfer)
        self._link = link

    def begin(self, step: ResolvedStep, chunk: Chunk, row: Row, record: bytes) -> None:
        row.parameters = params.decode(record)
        if record:
            self._link.pass_on(records.params_record(step, chunk), record)

    def first_tokens(
        self, step: ResolvedStep, prompts: Sequence[tuple[Row, mx.array]], times: StepTimes
    ) -> None:
        self._launch(step, mx.concatenate([logits for _, logits in prompts]))
        for row, _ in prompts:
            row.scores = []

    def decode(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        call.built()
        self._launch(call.step, outputs[0][:, -1, :])

    def verify(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        raise NotImplementedError  # its source guesses no tokens

    def _launch(self, step: ResolvedStep, logits: mx.array) -> None:
        self._source.launched(step, None)  # before: the tail may have its tokens here as soon as it computes
        launch(logits)


class Sampling(Logits):
    """Logits of which this member samples tokens."""

    def __init__(
        self,
        stage: Stage,
        source: Source,
        way_out: Exit,
        transfer: Transfer,
        grammars: Grammars | None,
        drafter: TailDrafter | None = None,
        sampled: Sampled | None = None,
    ) -> None:
        super().__init__(stage, source, way_out, transfer)
        self._receipts = sampled
        self._grammars = grammars
        self._drafter = drafter
        self._watching = False

    def watch(self, step: ResolvedStep) -> None:
        super().watch(step)
        asked = step.asks or step.drafts > 0 or step.guesses > 0
        self._watching = self._drafter is not None and self._drafter.watch(step.rows, asked=asked)

    def begin(self, step: ResolvedStep, chunk: Chunk, row: Row, record: bytes) -> None:
        parameters = params.decode(record)
        if parameters.grammar and self._grammars is not None:
            matcher = self._grammars.start(parameters.grammar, parameters.answered)
            parameters = dataclasses.replace(parameters, matcher=matcher)
        if self._drafter is not None and (parameters.prompt or chunk.taps):
            self._drafter.begin(chunk, parameters.prompt)
        if parameters.prompt:
            parameters = dataclasses.replace(parameters, prompt=())
        if parameters.receipt and self._receipts is not None:
            self._receipts.begin(row.number, chunk.choices, parameters.receipt, parameters.position)
        row.parameters = parameters

    def chunk(self, call: StageCall, row: Row, chunk: Chunk) -> mx.array | None:
        self._stage.tapping = self._prefill.tapping = chunk.taps
        drafter = self._drafter
        if drafter is None or not (drafter.follows(row.number) and drafter.watch([row.number])):
            return super().chunk(call, row, chunk)
        logits = super().chunk(call, row, chunk)
        drafter.fill(chunk)
        return logits

    def first_tokens(
        self, step: ResolvedStep, prompts: Sequence[tuple[Row, mx.array]], times: StepTimes
    ) -> None:
        parameters = [row.parameters for row, _ in prompts if row.parameters is not None]
        sampler = Sampler(parameters, [row.position for row in parameters])
        logits = [logits for _, logits in prompts]
        prompt_scores = [words for row, _ in prompts for words in row.scores]
        tokens, *report = self._sampled(
            sampler, logits[0] if len(logits) == 1 else mx.concatenate(logits), prompt_scores
        )
        results = self._transfer.send_buffer([tokens, *report])
        times.built = time.perf_counter()
        scored = (
            len(each.scored) - 1 if row.scores else 0
            for each, (row, _) in zip(parameters, prompts, strict=True)
        )
        asking = asking_of((row.logprobs for row in parameters), scored)
        self._next_chunk(times)
        self._hand_out(step, asking, tokens, results, times)
        for index, (row, _) in enumerate(prompts):
            row.sampler = sampler.extract(index)
            row.scores = []
            if self._drafter is not None:
                self._drafter.first(row.number, tokens[index : index + 1])

    def decode(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        sampler = lane.sampler
        assert sampler is not None
        looks = sampler.looks(outputs[0].shape[-1])
        if looks:
            call.wait()
        if looks or (call.input.buffer is None and not sampler.greedy):
            launch(outputs)  # the device starts while masks and the sampler's many operations are made
        tokens, *report = self._sampled(sampler, outputs[0][:, -1, :])
        self._deliver(call, lane, sampler, sampler.asking, tokens, report)

    def verify(self, call: StageCall, lane: Lane, outputs: list[mx.array]) -> None:
        sampler = lane.sampler
        assert sampler is not None
        if sampler.looks(outputs[0].shape[-1]):
            call.wait()
        tokens, report, asking = sampler.run(outputs[0])
        self._deliver(call, lane, sampler, asking, tokens, [] if report is None else [report])

    def _deliver(
        self,
        call: StageCall,
        lane: Lane,
        sampler: Sampler,
        asking: Asking,
        tokens: mx.array,
        report: list[mx.array],
    ) -> None:
        """Sends tokens of a lane's rows, with guesses behind those of each row if the step wants some."""
        step, drafter, watching = call.step, self._drafter, self._watching
        hidden = drafter.seen(1 + step.drafts) if drafter is not None and watching else None
        if hidden is not None:
            (hidden,) = lane.gathered([hidden])
        guesses = []
        if step.guesses:
            call.wait()  # a model's code may evaluate arrays
            guesses = [self._guesses(step, sampler, tokens, hidden).flatten()]
        results = self._transfer.send_buffer([tokens, *guesses, *report])
        call.built()
        self._hand_out(step, asking, tokens, results, call.times)
        if drafter is not None and hidden is not None and not step.guesses:
            by_row = tokens.reshape(len(step.rows), -1)
            drafter.follow(step.rows, hidden, by_row, unsettled=step.drafts > 0)

    def _guesses(
        self, step: ResolvedStep, sampler: Sampler, tokens: mx.array, hidden: mx.array | None
    ) -> mx.array:
        """What is guessed behind each row's last token that counts, uint32 [rows, step.guesses].

        The tail knows which token that is: the drafts of such a step are its own.
        """
        drafter, rows = self._drafter, step.rows
        if drafter is None or hidden is None:
            return mx.zeros((len(rows), step.guesses), mx.uint32)
        by_row, counts = tokens.reshape(len(rows), -1), [1] * len(rows)
        if step.drafts:
            self._wait_for(tokens)
            counts = drafter.right(rows, np.array(by_row).tolist())
        given = hidden, by_row, counts, step.guesses, sampler.ahead(counts)
        return drafter.guess(rows, *given, unsettled=step.drafts > 0)

    @staticmethod
    def _sampled(
        sampler: Sampler, logits: mx.array, prompt_scores: Sequence[mx.array] = ()
    ) -> list[mx.array]:
        """Tokens, uint32 [rows], and the log-probabilities that rows ask for."""
        tokens = sampler(logits)
        report = sampler.report(logits, tokens)
        return [tokens] if report is None else [tokens, report, *prompt_scores]


def behind(arrays: list[object]) -> mx.array:
    """A number that is computed after the arrays, uint32 [1].

    A thread that waits for it holds none of the arrays: the next chunk may be written into their memory.
    """
    flat = [array for _, array in tree_flatten(arrays) if isinstance(array, mx.array)]
    number: mx.array = mx.depends([mx.zeros((1,), mx.uint32)], flat)[0]
    return number


def launch(*arrays: object) -> None:
    """Has the device start on arrays, without waiting for them."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def states(cache: Cache) -> list[object]:
    """A cache's arrays, nested."""
    return [states(part) if isinstance(part, list) else part.state for part in cache]
