"""The real scheduler over Macs of `bench/macs.toml`, in virtual time (`bench.paced.ring`).

A stage's steps take what `StageTime` says, a hop what the link needs. Stages time every size that
`node.engine.warm_up` knows, whereas a real one leaves out sizes for which its seconds do not suffice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from statistics import mean

from bench.agents import ANSWER, PROGRAMS, RESULT, TURNS
from bench.frame import Result
from bench.mixed import LISTS
from bench.paced.alone import Alone, alone, together
from bench.paced.disk import DiskTime, VirtualDisk
from bench.paced.figures import StageTime, cluster, figures
from bench.paced.least import Turn, least_again
from bench.paced.ring import VirtualRing, Work
from bench.summaries import percentile
from sealring.gateway.scheduler import (
    Action,
    MemberMemory,
    RecallBlocks,
    RingFacts,
    StepCosts,
    Timed,
)
from sealring.mesh.ring import KEY_BYTES, NO_CHAIN, Chain, Ends, PrefixNames, chain_of
from sealring.node.engine.device import CHUNK, METAL_EDGES
from sealring.node.engine.warm_up import LONG_ON_GPU, LONG_ROWS, TIMED_ROWS, TIMED_TOKENS
from sealring.node.stored.policy import Sights
from sealring.v1 import control_pb2 as control

MOST_ROWS = 64
CONTEXT = 65_536
ASKED_ONCE = 4000, 12_000
"""Tokens of the shortest and the longest prompt that is asked once."""

_RECORD_RATE = 1.9e9
"""Bytes a second that a processor seals and copies."""

_TOKENS_A_WORD = 1.3


@dataclass(frozen=True)
class Agents:
    """Agents that begin with the same `shared` tokens. A turn adds `new` tokens to the last answer; thinking
    takes between the seconds of `thinks` after each."""

    count: int = 4
    shared: int = 30_000
    new: int = 300
    answer: int = 300
    thinks: tuple[float, float] = (2.0, 10.0)
    turns: int = 10


class VirtualMacs(VirtualRing):
    """A ring of one request list."""

    def __init__(
        self,
        text: str,
        model: str,
        link: str = "tb5",
        *,
        support: control.PrefixSupport.ValueType = control.PREFIX_SUPPORT_UNSPECIFIED,
        rows: int = MOST_ROWS,
        memory: int = 1 << 30,
        mark: int = 0,
        disk: DiskTime | None = None,
    ) -> None:
        """`memory`: tokens of which each stage has the caches. A mark takes as much as `mark` tokens. `disk`:
        the members store prefixes."""
        known, names = figures(), cluster(text)
        self._model, many = known.models[model], len(names)
        self._stages = [
            StageTime(known.machines[name], self._model, 1 / many, place == many - 1)
            for place, name in enumerate(names)
        ]
        way = known.links[link]
        self._byte_seconds = 1 / way.bytes_per_second + 1 / _RECORD_RATE
        self._said: dict[str, bytes] = {}
        self._names: dict[int, PrefixNames] = {}
        self._chains: dict[int, Chain] = {}
        self._once: set[str] = set()
        self._disk = VirtualDisk(disk, lambda: self.now) if disk else None
        costs = StepCosts.of([list(_timed(stage)) for stage in self._stages])
        member = MemberMemory(1024, 1024 * mark, 1024 * memory, 1024 * mark)
        facts = RingFacts((member,) * many, rows, CHUNK, support, costs=costs, recalls=disk is not None)
        super().__init__(facts, many, way.seconds + way.wakeups + known.completion)

    def attach(self) -> None:
        """Every process is started, or ended and started again between two turns: what is on disk is left."""
        self._ends, self._sights = Ends(), Sights()
        if self._disk:
            self._disk.end_epoch()
        super().attach()

    def ask(self, name: str, prompt: int, answer: int, tokens: bytes = b"", *, returns: bool = True) -> None:
        """Sends a request. `tokens`, 4 bytes each, are of prompt and answer, which are then kept. `returns`:
        by its shape, the next prompt begins with this one."""
        if not returns:
            self._once.add(name)
        self._said[name] = tokens
        super().ask(name, prompt, answer)

    def alone(self, new: int, cached: int) -> Alone:
        """What `new` tokens behind `cached` ones take by figures."""
        return alone(self._stages, self.stages * self.hop, new, cached)

    def takes(self, stage: int, work: Work) -> float:
        return self._stages[stage].step(work.rows, work.tokens, work.past)

    def travels(self, work: Work) -> float:
        return work.rows * work.tokens * self._model.hidden * 2 * self._byte_seconds

    def act(self, action: Action) -> None:
        if isinstance(action, RecallBlocks) and action.chain.names and self._disk:
            when = self._disk.read(action.chain)
            for rank in range(self.stages):
                recalled = control.Recalled(number=action.number, tokens=action.chain.tokens, rank=rank)
                self.at(when, partial(self.scheduler.recalled, recalled))
        super().act(action)

    def opened(self, row: int) -> control.RowOpened:
        opened, request = super().opened(row), self.rows[row]
        tokens = self._said[request.id][: 4 * opened.prompt_tokens]
        if tokens:
            names = self._names[row] = PrefixNames(bytes(KEY_BYTES), b"c")
            opened.prefixes, opened.ends = self._ends.extend(names, tokens)
        if tokens and self._disk:
            chain = chain_of(bytes(KEY_BYTES), b"c", tokens)
            self._chains[row] = self._sights.worth(chain, returns=request.id not in self._once)
            opened.stored = self._disk.held(chain).packed()
        return opened

    def announce(self, step: control.Step) -> None:
        """Members write what is computed behind the steps."""
        for change in step.changes if self._disk else ():
            for place in (change.keep, change.mark):
                chain = self._chains.get(place.row, NO_CHAIN)
                if place.tokens and chain.first(place.tokens).tokens == place.tokens:
                    self._disk.marked(chain.first(place.tokens))
        for chunk in step.prefill.chunks if self._disk else ():
            self._disk.computed(chunk.row, self._chains.get(chunk.row, NO_CHAIN).first(chunk.end))
        super().announce(step)

    def sampled(self, output: control.RowOutput) -> None:
        super().sampled(output)
        if output.finish and (names := self._names.pop(output.row, None)) is not None:
            name = self.rows[output.row].id
            prompt, tokens = 4 * self.prompts[name], self._said[name]
            whole = prompt + 4 * output.delta.tokens
            for said in (tokens[prompt : whole - 4], tokens[whole - 4 : whole]):
                prefixes, ends = self._ends.extend(names, said)
                output.prefixes += prefixes
                output.ends += ends


def _timed(stage: StageTime) -> Iterable[Timed]:
    """The steps that a stage times when it is loaded."""
    for rows in sorted({*(size for size in (*TIMED_ROWS, *METAL_EDGES) if size <= MOST_ROWS)}):
        yield Timed(rows, 1, stage.step(rows, 1, 0))
    longest = 1
    for tokens in (size for size in TIMED_TOKENS[1:] if size <= CHUNK):
        if (took := stage.step(1, tokens, 0)) > LONG_ON_GPU:
            break
        longest = tokens
        yield Timed(1, tokens, took)
    for rows in LONG_ROWS:
        yield Timed(rows, 1, stage.step(rows, 1, longest), longest)


def static(text: str, model: str, rows: int, steps: int = 100) -> Result:
    """Tokens a second of rows that all decode, and the seconds between tokens."""
    ring = VirtualMacs(text, model)
    for number in range(rows):
        ring.ask(f"row{number}", 16, 100_000)

    def have(tokens: int) -> bool:
        return len(ring.arrivals) == rows and min(map(len, ring.arrivals.values())) > tokens

    ring.run(until=lambda: have(20))
    begun = ring.now
    ring.run(until=lambda: have(20 + steps))
    rate = ring.tokens(begun, ring.now) / (ring.now - begun)
    return {"tokens_per_second": rate, **_between(ring.gaps("row", begun, ring.now))}


def mixed(text: str, model: str, at_once: int, seed: int, each: int = 4, name: str = "mixed") -> Result:
    """A closed loop of the requests of a list, until the last is sent."""
    generator, (words, answers) = random.Random(f"{name} {seed}"), LISTS[name]
    left = [
        (round(words.draw(generator) * _TOKENS_A_WORD), answers.draw(generator))
        for _ in range(at_once * each)
    ]
    ring = VirtualMacs(text, model)
    for number, (prompt, answer) in enumerate(left):
        if number >= at_once:
            ring.run(until=lambda: bool(ring.ended))
            ring.ended.popleft()
        ring.ask(f"r{number}", prompt, answer)
    end = ring.now
    ring.run()
    firsts = ring.firsts("r")
    return {
        "tokens_per_second": ring.tokens(0.0, end) / end,
        "first_mean": mean(firsts),
        "first_p95": percentile(firsts, 0.95),
        **_between(ring.gaps("r", 0.0, end)),
    }


def beside(text: str, model: str, rows: int, prompt: int = 4096) -> Result:
    """Rows that decode beside a prompt: their p95 between tokens, and the prompt's seconds, both as times of
    undisturbed."""
    ring = VirtualMacs(text, model)
    ring.ask("alone", prompt, 1)
    ring.run()
    for number in range(rows):
        ring.ask(f"row{number}", 16, 100_000)
    ring.run(until=lambda: len(ring.arrivals.get("row0", ())) > 60)
    begun = ring.now
    quiet = percentile(ring.gaps("row", begun - 20 * ring.gaps("row")[-1], begun), 0.5)
    ring.ask("beside", prompt, 1)
    ring.run(until=lambda: "beside" in ring.arrivals)
    between = ring.gaps("row", begun, ring.now)
    return {
        "between_p95": percentile(between, 0.95) / quiet,
        "prompt": ring.first("beside") / ring.first("alone"),
        "alone": ring.first("alone"),
    }


def agents(text: str, model: str, given: Agents, seed: int) -> Result:
    """A closed loop of agents. `first` are times of what a turn takes alone to its first token, and `between`
    times of what is usual between two of its tokens. `least` are times, by figures, of prompts that come at
    the same moments to a ring where nothing decodes."""
    ring = VirtualMacs(text, model, support=control.PREFIX_SUPPORT_ANY)
    generator = random.Random(seed)

    def tokens(agent: int, count: int) -> bytes:
        return b"same" * given.shared + f"{agent:4}".encode() * (count - given.shared)

    def turn(agent: int, number: int, has: int) -> None:
        prompt = has + given.new
        ring.ask(f"a{agent}.{number}", prompt, given.answer, tokens(agent, prompt + given.answer))

    ring.ask("shared", given.shared, 1, tokens(0, given.shared + 1))
    ring.run()
    alone = []
    for number in range(given.turns):
        turn(-1, number, given.shared + number * (given.new + given.answer))
        ring.run()
        alone.append(ring.first(f"a-1.{number}"))
    quiet = percentile(ring.gaps("a-1"), 0.5)
    begun = ring.now
    for agent in range(given.count):
        ring.at(begun + generator.uniform(0, given.thinks[1]), partial(turn, agent, 0, given.shared))
    ring.ended.clear()
    left = given.count * given.turns
    while left:
        ring.run(until=lambda: bool(ring.ended))
        agent, number = map(int, ring.ended.popleft()[1:].split("."))
        left -= 1
        if number + 1 < given.turns:
            has = given.shared + (number + 1) * (given.new + given.answer)
            when = ring.now + generator.uniform(*given.thinks)
            ring.at(when, partial(turn, agent, number + 1, has))
    ids = [f"a{agent}.{number}" for agent in range(given.count) for number in range(given.turns)]
    firsts = [ring.first(name) / alone[int(name.partition(".")[2])] for name in ids]
    between = ring.gaps("a", begun)
    turns = [int(name.partition(".")[2]) for name in ids]
    by_figures = [ring.alone(given.new, given.shared + turn * (given.new + given.answer)) for turn in turns]
    least = together(zip(map(ring.asked.__getitem__, ids), by_figures, strict=True))
    return {
        "alone": mean(alone),
        "first_p50": percentile(firsts, 0.5),
        "first_p95": percentile(firsts, 0.95),
        "least_p95": percentile(least, 0.95),
        "between_p50": percentile(between, 0.5) / quiet,
        "between_p95": percentile(between, 0.95) / quiet,
        "between_most": max(between) / quiet,
        "turn": mean(map(ring.whole, ids)),
        "tokens_per_second": len(ids) * given.answer / (ring.now - begun),
    }


def disk_of(text: str, model: str) -> DiskTime:
    """The disk of the slowest Mac of a ring, by figures: blocks are read or written while others are opened
    or sealed, so that the slower of both counts."""
    known, names = figures(), cluster(text)
    rates = [
        [min(1e9 * known.machines[name].ssd[way], known.seals) for name in names] for way in ("read", "write")
    ]
    stage = known.models[model].kv_bytes * known.models[model].layers / len(names)
    return DiskTime(stage, 0.0, *map(min, rates))


def sessions(
    text: str,
    model: str,
    count: int,
    seed: int,
    room: float = 0.0,
    turns: int = TURNS,
    mark: int = 0,
    *,
    rendered: bool = False,
    disk: DiskTime | None = None,
    restart: bool = False,
    tools: bool = True,
    once: int = 0,
) -> Result:
    """Agents as those of `bench.agents`, at once, without a pause between their turns.

    With `mark` the model has windows or states, which take as much memory as the keys and values of `mark`
    tokens, and its caches cannot be cut. If `rendered`, an answer has other tokens in the next prompt. With
    `restart` every process is started again once each agent has had half of its turns. Without `tools` an
    agent's first prompt looks like one that is asked once. Behind each turn come `once` prompts of others
    that are.

    The ring has memory for `room` rows of CONTEXT tokens, by default for one of each agent. `again` is the
    share of the tokens of each turn's last prompt that were computed again, and `answers` that of answers'
    tokens. `dropped` is the share of turns in which more was computed again than lies between two boundaries.
    The first turn after a restart is not in these, and has `after_restart`. `least` is `again` by the best
    use of memory, for turns in this order. `by_turn` are seconds to the first token and computed tokens.
    """
    support = control.PREFIX_SUPPORT_EXACT if mark else control.PREFIX_SUPPORT_ANY
    memory = round((room or count) * (CONTEXT + mark))
    ring = VirtualMacs(text, model, support=support, rows=count, memory=memory, mark=mark, disk=disk)
    generators = [random.Random(f"agent {seed} {number}") for number in range(count)]
    spelt: dict[int, bytes] = {}
    prompts: dict[tuple[int, int], tuple[int, int]] = {}
    first: set[tuple[int, int]] = set()

    def turn(agent: int, number: int) -> None:
        generator = generators[agent]
        program = PROGRAMS[-1 - agent % len(PROGRAMS)]
        result, answer = RESULT.draw(generator), ANSWER.draw(generator)
        before = spelt.get(agent, b"")
        if not before or len(before) // 4 + result + answer > CONTEXT:  # it begins anew, as agents do then
            before = f"{program % 9999:4}".encode() * program
            first.add((agent, number))
        prompt = before + f"{agent:4}".encode() * result
        said = prompt + f"{-1 - agent:4}".encode() * answer
        spelt[agent] = prompt + f"{-99 - agent:4}".encode() * answer if rendered else said
        prompts[agent, number] = len(prompt) // 4, answer
        returns = tools or (agent, number) not in first
        ring.ask(f"a{agent}.{number}", len(prompt) // 4, answer, said, returns=returns)

    others, asked = random.Random(f"stray {seed}"), itertools.count(1)

    def ask_once() -> None:
        number, tokens = next(asked), others.randint(*ASKED_ONCE)
        said = f"{5000 + number % 5000:4}".encode() * (tokens + 200)
        ring.ask(f"o{number}", tokens, 200, said, returns=False)

    def take(begin: int, end: int) -> None:
        for agent in range(count):
            turn(agent, begin)
        left = count * (end - begin)
        while left:
            ring.run(until=lambda: bool(ring.ended))
            if (name := ring.ended.popleft()).startswith("o"):
                continue
            agent, number = map(int, name[1:].split("."))
            left -= 1
            for _ in range(once):
                ask_once()
            if number + 1 < end:
                turn(agent, number + 1)

    middle = turns // 2 if restart else 0
    if restart:
        take(0, middle)
        ring.run()
        ring.attach()
    take(middle, turns)
    again = dropped = whole = said = answers = longest = lost = had = 0
    ran, firsts = [], []
    by_turn: list[list[tuple[float, int]]] = [[] for _ in range(turns)]
    for (agent, number), (prompt, answer) in prompts.items():
        name = f"a{agent}.{number}"
        before, answered = (0, 0) if (agent, number) in first else prompts[agent, number - 1]
        ran.append(Turn(ring.begun[name], ring.arrivals[name][-1], agent, prompt + answer, prompt, before))
        by_turn[number].append((ring.first(name), prompt - ring.cached[name]))
        missing = before + answered - ring.cached[name]
        if not before:
            continue
        if restart and number == middle:
            lost, had = lost + max(0, missing - answered), had + before
            continue
        again += max(0, missing - answered)
        dropped += missing - answered > before // 32
        said += min(answered, max(0, missing))
        whole, answers, longest = whole + before, answers + answered, max(longest, before)
        firsts.append(ring.first(name))
    return {
        "again": again / whole,
        "least": least_again(ran, memory) / whole,
        "dropped": dropped / len(firsts),
        "answers": said / answers,
        "first_p50": percentile(firsts, 0.5),
        "first_p95": percentile(firsts, 0.95),
        "longest": longest,
        "seconds": ring.now,
        "after_restart": lost / max(1, had),
        "by_turn": by_turn,
    }


def _between(gaps: list[float]) -> Result:
    return {"between_p50": percentile(gaps, 0.5), "between_p95": percentile(gaps, 0.95)}
