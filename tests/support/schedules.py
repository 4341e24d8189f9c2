"""What a gateway could announce: whole runs of steps, put together by chance."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from stagering import (
    CHUNK,
    PATIENCE_SECONDS,
    Prompts,
    Ring,
    compute_thread,
    expected,
    prompt_of,
    run_on,
    stages_of,
)

from sealring.mesh.ring import Origin
from sealring.node.engine import RowParameters, params, support
from sealring.v1 import control_pb2 as control


def make_steps(
    choices: random.Random,
    rows: dict[int, tuple[int, int]],
    lanes: int,
    cancelled: set[int] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> list[control.Step]:
    """A whole run: rows (prompt tokens, tokens to generate) come, are prefilled, decoded and evicted.

    What happens when is up to `choices`. Rows may be stepped more often than needed, as by a gateway that
    announces ahead. With `cancelled` some rows leave at any time, and are put there. `sizes` are those of the
    rows' parameter records, where they are not of one block.
    """
    waiting = sorted(rows)
    done: dict[int, int] = {}
    ready: list[int] = []
    lane_rows: dict[int, list[int]] = {}
    generated = dict.fromkeys(rows, 0)
    finished: set[int] = set()
    changes: list[control.Change] = []
    steps: list[control.Step] = []

    def add(**work: Any) -> None:
        steps.append(control.Step(number=len(steps) + 1, changes=changes, **work))
        changes.clear()

    def evict(row: int) -> None:
        changes.append(control.Change(evict=control.Evict(row=row)))

    while waiting or done or ready or lane_rows:
        actions = (
            ["prefill"] * bool(waiting or done) + ["admit"] * bool(ready) + ["decode"] * 3 * bool(lane_rows)
        )
        actions += ["evict"] * any(row in finished for members in lane_rows.values() for row in members)
        if cancelled is not None and (done or lane_rows) and choices.random() < 0.1:
            row = choices.choice([*done, *(row for members in lane_rows.values() for row in members)])
            cancelled.add(row)
            done.pop(row, None)
            remaining = {lane: [m for m in members if m != row] for lane, members in lane_rows.items()}
            lane_rows = {lane: members for lane, members in remaining.items() if members}
            evict(row)
            continue
        action = choices.choice(actions)
        if action == "prefill":
            going_on = choices.randint(0 if waiting else 1, len(done)) if done else 0
            chunks = [(row, done[row]) for row in choices.sample(sorted(done), going_on)]
            while waiting and (not chunks or choices.random() < 0.4):
                chunks.append((waiting.pop(0), 0))
            sent = []
            for row, start in chunks:
                total = rows[row][0]
                end = min(total, start + choices.randint(1, CHUNK))
                sent.append(
                    control.Chunk(
                        row=row,
                        start=start,
                        end=end,
                        prompt_tokens=total,
                        params_bytes=(sizes or {}).get(row, params.BLOCK) if start == 0 else 0,
                    )
                )
                done[row] = end
                if end == total:
                    del done[row]
                    ready.append(row)
                    generated[row] = 1
            add(prefill=control.Prefill(chunks=sent))
        elif action == "admit":
            for row in choices.sample(ready, choices.randint(1, len(ready))):
                ready.remove(row)
                if rows[row][1] <= 1:
                    evict(row)
                    continue
                lane = choices.randrange(lanes)
                lane_rows.setdefault(lane, []).append(row)
                changes.append(control.Change(admit=control.Admit(row=row, lane=lane)))
        elif action == "decode":
            lane = choices.choice(sorted(lane_rows))
            add(decode=control.Decode(lane=lane))
            for row in lane_rows[lane]:
                generated[row] += 1
                if generated[row] >= rows[row][1]:
                    finished.add(row)
        else:
            lane, row = choices.choice(
                [(lane, row) for lane, members in lane_rows.items() for row in members if row in finished]
            )
            lane_rows[lane].remove(row)
            if not lane_rows[lane]:
                del lane_rows[lane]
            evict(row)
    if changes:
        add()
    return steps


class PrefixSteps:
    """A run in which prefixes of rows are kept, dropped and reused at any time that the composition allows.

    `texts` are prompts with the tokens that follow them, so that a prefix may reach into an answer.
    """

    def __init__(
        self, choices: random.Random, prompts: dict[int, list[int]], texts: dict[int, list[int]], exact: bool
    ) -> None:
        self.choices, self.prompts, self.texts, self.exact = choices, prompts, texts, exact
        self.steps: list[control.Step] = []
        self.waiting = sorted(prompts)
        self.held: dict[int, int] = {}
        self.lanes: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self.marks: dict[int, list[int]] = {}  # of rows
        self.kept_marks: dict[int, list[int]] = {}
        self.prefixes = 0

    def make(self) -> list[control.Step]:
        while self.waiting or self.held:
            step = control.Step(number=len(self.steps) + 1)
            self._keep_and_drop(step)
            self._move(step)
            self._work(step)
            self.steps.append(step)
        return self.steps

    def _keep_and_drop(self, step: control.Step) -> None:
        for row in list(self.held):
            if self.exact:
                self._mark(step, row)
            if self.choices.random() < 0.3 and self.held[row] <= len(self.texts[row]):
                self._keep(step, row)
        for prefix in list(self.kept):
            if self.choices.random() < 0.1:
                step.changes.add().drop.prefix = prefix
                del self.kept[prefix]
            elif self.choices.random() < 0.1 and len(marks := self.kept_marks[prefix]) > 1:
                gone = self.choices.choice(marks[:-1])
                step.changes.add().unmark.CopyFrom(control.Unmark(prefix=prefix, marks=[gone]))
                self.kept_marks[prefix] = [mark for mark in marks if mark != gone]

    def _mark(self, step: control.Step, row: int) -> None:
        marks, held = self.marks.get(row, []), self.held[row]
        in_lane = any(row in rows for rows in self.lanes.values())
        if not in_lane and held not in marks and self.choices.random() < 0.3:
            step.changes.add().mark.CopyFrom(control.Mark(row=row, tokens=held))
            self.marks[row] = [*marks, held]
        elif marks and self.choices.random() < 0.1:
            gone = self.choices.choice(marks)
            step.changes.add().unmark.CopyFrom(control.Unmark(row=row, marks=[gone]))
            self.marks[row] = [mark for mark in marks if mark != gone]

    def _keep(self, step: control.Step, row: int) -> None:
        self.prefixes += 1
        held, has = self.held[row], self.marks.get(row, [])
        tokens = self.choices.choice([held, held, *has]) if self.exact else self.choices.randint(1, held)
        before = [mark for mark in has if mark < tokens and self.exact]
        marks = sorted(self.choices.sample(before, self.choices.randint(0, len(before))))
        keep = control.Keep(prefix=self.prefixes, row=row, tokens=tokens, marks=marks)
        step.changes.add().keep.CopyFrom(keep)
        self.kept[self.prefixes] = self.texts[row][:tokens]
        self.kept_marks[self.prefixes] = [*marks, tokens]
        if tokens == held:
            self.marks[row] = [*marks, tokens]

    def _move(self, step: control.Step) -> None:
        laned = {row for rows in self.lanes.values() for row in rows}
        for row in list(self.held):
            over = self.held[row] >= len(self.texts[row])
            if over or self.choices.random() < 0.03:
                step.changes.add().evict.row = row
                del self.held[row]
                lanes = {lane: [each for each in rows if each != row] for lane, rows in self.lanes.items()}
                self.lanes = {lane: rows for lane, rows in lanes.items() if rows}
            elif row not in laned and self.held[row] == len(self.prompts[row]):
                lane = self.choices.randrange(2)
                step.changes.add().admit.CopyFrom(control.Admit(row=row, lane=lane))
                self.lanes.setdefault(lane, []).append(row)

    def _work(self, step: control.Step) -> None:
        if self.lanes and self.choices.random() < 0.6:
            step.decode.lane = self.choices.choice(sorted(self.lanes))
            for row in self.lanes[step.decode.lane]:
                self.held[row] += 1
            return
        for row in [row for row in self.held if self.held[row] < len(self.prompts[row])]:
            self._chunk(step, row, self.held[row], 0, 0)
        if self.waiting:
            row = self.waiting.pop(0)
            self._chunk(step, row, *self._reuse(self.prompts[row]), params.BLOCK)

    def _reuse(self, prompt: list[int]) -> tuple[int, int]:
        found = [(0, 0)]
        for prefix, tokens in self.kept.items():
            common = 0
            while common < min(len(tokens), len(prompt) - 1) and tokens[common] == prompt[common]:
                common += 1
            if self.exact:
                found += [(mark, prefix) for mark in self.kept_marks[prefix] if mark <= common]
            elif common:
                found.append((self.choices.randint(1, common), prefix))
        return max(found)

    def _chunk(self, step: control.Step, row: int, start: int, prefix: int, size: int) -> None:
        total = len(self.prompts[row])
        end = min(total, start + self.choices.randint(1, CHUNK))
        if prefix:
            self.marks[row] = [mark for mark in self.kept_marks[prefix] if mark <= start]
        takes = prefix > 0 and self.choices.random() < 0.3
        if takes:
            del self.kept[prefix]
        step.prefill.chunks.add(
            row=row, start=start, end=end, prompt_tokens=total, params_bytes=size, prefix=prefix, takes=takes
        )
        self.held[row] = end


TRIMMABLE = {"llama", "qwen3", "mixtral", "deepseek_v3", "qwen3:4", "afm7", "minimax_m3_vl", "nemotron-nas"}
TRIMMABLE |= {"ernie4_5_moe_vl", "hunyuan_vl", "hy_v4"}


def check_prefixes(family: str, tails: list[tuple[int, int]], choices: random.Random, size: int) -> int:
    """Rows share a system prompt, or go on with the answer of an earlier one. Returns the tokens reused."""
    prompts: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    for row, (turn, length) in enumerate(tails, start=1):
        begin = prompt_of(family, 0, 14) if row < 3 or not turn else texts[row - turn]
        prompts[row] = begin + prompt_of(family, row, length)
        texts[row] = prompts[row] + expected(family, tuple(prompts[row]), 5)
    stages = stages_of(family, size)
    allowed = compute_thread(0).submit(lambda: support(stages[0].make_cache())).result(PATIENCE_SECONDS)
    assert (allowed == control.PREFIX_SUPPORT_ANY) == (family in TRIMMABLE)
    steps = PrefixSteps(choices, prompts, texts, allowed != control.PREFIX_SUPPORT_ANY).make()
    done = run_on(stages, steps, {row: (prompt, RowParameters()) for row, prompt in prompts.items()})
    for row, got in done.answers.items():
        assert got[:5] == texts[row][len(prompts[row]) :][: len(got)]
    return sum(done.reused)


def check_prefixes_over_epochs(family: str, size: int) -> list[int]:
    """CHUNK tokens of a row are kept, and a row of the next epoch begins with them. Returns those reused."""
    prompt = prompt_of(family, 0, CHUNK)
    after = prompt_of(family, 1, 3)
    stages = stages_of(family, size)
    rows = {1: (prompt, RowParameters()), 2: (prompt + after, RowParameters())}
    first = Ring(stages, Prompts(rows))
    begin = control.Step(number=1)
    begin.prefill.chunks.add(row=1, end=CHUNK, prompt_tokens=CHUNK, params_bytes=params.BLOCK)
    keep = control.Step(number=2, changes=[control.Change(keep=control.Keep(prefix=1, row=1, tokens=CHUNK))])
    keep.changes.add().admit.row = 1
    keep.decode.lane = 0
    try:
        first.announce(begin)
        first.announce(keep)
        first.wait_for(2)
        first.break_off()
    finally:
        first.close()
    origins = [each.turn_over("") for each in first.prefixes]
    assert origins == [{Origin(1, 1, CHUNK): ()}] * size
    second = Ring(stages, Prompts(rows), number=2, prefixes=first.prefixes)
    reuse = control.Step(number=1)
    reuse.changes.add().adopt.CopyFrom(control.Adopt(prefix=1, epoch=1, row=1, tokens=CHUNK))
    reuse.prefill.chunks.add(
        row=2, start=CHUNK, end=CHUNK + 3, prompt_tokens=CHUNK + 3, params_bytes=params.BLOCK, prefix=1
    )
    decode = [control.Step(number=number, decode=control.Decode(lane=0)) for number in range(2, 6)]
    decode[0].changes.add().admit.row = 2
    try:
        for step in (reuse, *decode):
            second.announce(step)
        second.wait_for(5)
    finally:
        second.close()
    assert second.prompts.answers[2] == expected(family, (*prompt, *after), 5)
    return second.prompts.reused
