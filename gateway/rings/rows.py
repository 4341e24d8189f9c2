"""The rows of a ring's own scheduler in one epoch: prompts to the head, steps to every member."""

from __future__ import annotations

import hashlib
import time

from sealring.edge.inference.answer import AnswerWriter
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.epoch import Epoch, below_floor
from sealring.gateway.rings.idle import IdlePrefills
from sealring.gateway.rings.receipts import Receipts
from sealring.gateway.rings.shares import RingShares
from sealring.gateway.scheduler.actions import OpenRow
from sealring.gateway.scheduler.request import Request
from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError
from sealring.mesh.prompt.images import without_images
from sealring.mesh.prompt.options import own_of
from sealring.mesh.prompt.validate import check_text_envelope
from sealring.mesh.receipt.statement import MAX_EARLIER
from sealring.mesh.roster.rules import links_in_clear
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference


class Counters:
    """What is counted of one deployment's requests."""

    def __init__(self, metrics: Metrics, deployment: str) -> None:
        self.epochs_ended = metrics.epochs_ended.labels(deployment)
        self.steps = metrics.steps.labels(deployment)
        self.queries = metrics.prefix_queries.labels(deployment)
        self.hits = metrics.prefix_hits.labels(deployment)
        self.from_disk = metrics.prefix_from_disk.labels(deployment)
        self.prefilled_idle = metrics.prefilled_idle.labels(deployment)
        self.routed_hits = metrics.routed_hits.labels(deployment)
        self.drafted = metrics.drafted.labels(deployment)
        self.accepted = metrics.accepted.labels(deployment)


class Rows:
    """Tells the members of an epoch what the scheduler wants of its rows."""

    def __init__(
        self,
        epoch: Epoch,
        receipts: Receipts,
        idle: IdlePrefills,
        counters: Counters,
        shares: RingShares,
        secret: bytes,
    ) -> None:
        """`secret` makes pseudonyms of clients."""
        self.epoch = epoch
        self.unstarted: dict[int, tuple[str, AnswerWriter]] = {}
        """The requests of rows given to the head, and their answers, until the first step."""

        self._prefilled: dict[int, AnswerWriter] = {}
        """The answers of rows of which a part of the prompt was announced."""

        self._receipts = receipts
        self._idle = idle
        self._counters = counters
        self._shares = shares
        self._secret = secret

    def refusal(self, request: Request) -> SealringError | None:
        """Why the head is not given a prompt.

        A ring may be trusted less than its sender demands: one whose links are in clear gets nothing that is
        sealed, nor for which any trust is demanded. A model that cannot see gets no image: a tool's image is
        replaced by a note.
        """
        serving, floor = self.epoch.serving, request.min_trust
        if serving.min_trust < floor:
            return below_floor(floor, serving.min_trust)
        if serving.clear_links and (floor or request.sealed):
            return links_in_clear(serving.deployment)
        if self.epoch.abilities.sees:
            return None
        try:
            check_text_envelope(request.envelope.sealed)
            if request.shows:
                clear, lacks = request.envelope.clear, self.epoch.abilities.vision_not_installed
                clear.CopyFrom(without_images(clear, serving.deployment, not_installed=lacks))
        except (InvalidInput, FailedPrecondition) as error:
            return error
        return None

    def open(self, action: OpenRow, answer: AnswerWriter) -> None:
        """Gives a prompt to the head."""
        request, epoch = action.request, self.epoch
        epoch.streams.expect()
        answer.opened()
        self.unstarted[action.row] = request.id, answer
        envelope, choices = request.envelope, request.choices
        if action.resume is not None:
            envelope, choices = inference.Envelope(clear=envelope.clear), 1
            envelope.clear.resume.CopyFrom(action.resume)
        if request.receipt is not None:
            self._receipts.opened(action.row, request, action.resume)
            self._note_epochs(request, envelope, action.resume)
        opened = control.OpenRow(
            row=action.row,
            request_id=request.id,
            deployment=request.deployment,
            max_tokens=request.max_tokens,
            choices=choices if choices > 1 else 0,
            client=self._client(request.key),
            prefix_scope="all" if epoch.serving.share_prefixes else f"key {request.tenant}",
            receipt=request.receipt,
        )
        asked = control.ScheduleRequest(open=opened)
        asked.open.envelope.CopyFrom(envelope)  # last, as it would be copied with `opened`, too: 32 MiB
        unnamed = envelope.clear.sampling.unnamed
        if unnamed and not own_of(epoch.abilities.own, unnamed):  # earlier releases take such a receipt
            asked.open.envelope.clear.sampling.ClearField("unnamed")
        epoch.streams.send_prompt(asked.SerializeToString(), key=f"row {action.row}")

    def opened(self, row: int) -> None:
        """The head has read a prompt, and its row waits for memory."""
        if row in self.unstarted:
            self.unstarted[row][1].waits()

    def discard(self, row: int) -> None:
        self.unstarted.pop(row, None)
        discard = control.ScheduleRequest(discard=control.DiscardRow(row=row))
        self.epoch.take_back(f"row {row}", discard)

    def sign(self, row: int, tokens: int) -> None:
        """Has the tail sign for a row. The head signs by itself, once it has ended it."""
        if not tokens:
            self._receipts.unsigned(row)
        elif len(self.epoch.streams.streams) > 1:
            sign = control.ScheduleRequest(sign=control.SignRow(row=row, tokens=tokens))
            self.epoch.streams.send_tail(sign.SerializeToString())

    def announce(self, step: control.Step) -> None:
        self.epoch.tell_all(control.ScheduleRequest(step=step))
        self._counters.steps.inc()
        if self._idle.running:
            self._counters.prefilled_idle.inc(sum(chunk.end - chunk.start for chunk in step.prefill.chunks))
        for change in step.changes:
            if change.WhichOneof("change") == "restore":
                self._counters.from_disk.inc(change.restore.tokens)
            self._prefilled.pop(change.evict.row, None)
        for chunk in step.prefill.chunks:
            if chunk.start == 0 or chunk.prefix:
                self._first_chunk(chunk)
            if (answer := self._prefilled.get(chunk.row)) is not None:
                answer.prefilled(chunk.start, chunk.prompt_tokens)
                if chunk.end == chunk.prompt_tokens:
                    del self._prefilled[chunk.row]
        self.epoch.streams.expect()

    def _first_chunk(self, chunk: control.Chunk) -> None:
        opened = self.unstarted.pop(chunk.row, None)
        if self._idle.running:  # nothing else runs
            return
        self._counters.queries.inc(chunk.prompt_tokens)
        self._counters.hits.inc(chunk.start)
        if opened is not None:
            request_id, answer = opened
            self._prefilled[chunk.row] = answer
            self._shares.begin(request_id, answer.timings)
            answer.timings.computed = time.perf_counter()
            answer.computed()

    def _note_epochs(
        self, request: Request, envelope: inference.Envelope, resume: inference.Resume | None
    ) -> None:
        """Names the epochs that brought the answer so far to the head, and notes this one."""
        serving, choices = self.epoch.serving, request.progress.choices
        for choice in choices if resume is None else [choices[resume.choice]]:
            if resume is not None:
                begun = choice.epochs or [inference.EarlierEpoch(ring=serving.ring)]  # 0: by another gateway
                begun[-1].tokens = len(resume.tokens)
                choice.epochs = [each for each in begun if each.tokens][-MAX_EARLIER:]
                del envelope.clear.resume.earlier[:]
                envelope.clear.resume.earlier.extend(choice.epochs)
            choice.epochs.append(inference.EarlierEpoch(ring=serving.ring, epoch=serving.epoch))

    def _client(self, key: str) -> bytes:
        """A pseudonym of the client for the head, which learns only which prompts are of one client."""
        return hashlib.blake2b(key.encode(), key=self._secret, digest_size=16).digest()
