"""How much the engine adds to a decode step: one row in a ring of one against mlx-lm alone.

Both run the same model in the same process, in turns, greedily and to the same number of tokens; the engine
gets its steps one ahead of the one in flight, as a gateway sends them. With --rows above 1 there is no
comparison. Times are medians over the rounds, in milliseconds per token.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np

from bench.frame import Benchmark, Result, Table
from bench.models import by_name
from sealring.mesh.prompt.composition import ResolvedStep
from sealring.node.engine import device, mlx_lm_import, params
from sealring.node.engine.epoch import Allowance, Epoch
from sealring.node.engine.logprobs import Asking, TokenLogprobs
from sealring.node.engine.main import _SWITCH_SECONDS
from sealring.node.engine.staging import Stage, random_stage
from sealring.node.engine.staging.anatomy import dissect, full_cache
from sealring.node.engine.staging.quantization import CacheQuantization, cache_quantization
from sealring.node.engine.weights import load_lazily
from sealring.v1 import control_pb2 as control

CHUNK = 2048


class Prompts:
    """Random prompts; notes when each step's tokens came."""

    def __init__(self, prompt: list[int]) -> None:
        self._tokens = np.array(prompt, np.uint32)
        self.done: SimpleQueue[tuple[int, list[int], float]] = SimpleQueue()

    def prompt(self, row: int) -> Any:
        return self._tokens

    def parameters(self, row: int) -> bytes:
        return params.encode(params.RowParameters())

    def prefilled(self, row: int) -> None: ...

    def forget(self, row: int) -> None: ...

    def asking(self, rows: Sequence[int]) -> Asking:
        return ()

    def deliver(self, step: ResolvedStep, tokens: list[int], logprobs: Mapping[int, TokenLogprobs]) -> None:
        self.done.put((step.number, tokens, time.perf_counter()))


def run_engine(stage: Stage, prompt: list[int], tokens: int, rows: int) -> tuple[list[int], float, Epoch]:
    """Tokens of the first row, and seconds from its first token to its last."""
    faults: list[BaseException] = []
    prompts = Prompts(prompt)
    epoch = Epoch(
        1,
        stage,
        prefill_chunk=CHUNK,
        max_rows=rows,
        allowance=Allowance(0, 0, 0),
        channel=None,
        prompts=prompts,
        on_fault=lambda error: (faults.append(error), prompts.done.put((0, [], 0.0))),
    )
    tasks: SimpleQueue[ResolvedStep | None] = SimpleQueue()
    feeder = threading.Thread(target=feed, args=(epoch, tasks, prompts, len(prompt), tokens, rows))
    answer: list[tuple[int, list[int], float]] = []
    feeder.answer = answer  # type: ignore[attr-defined]
    feeder.start()
    while (step := tasks.get()) is not None:
        epoch.execute(step)
    feeder.join()
    epoch.close()
    if faults:
        raise faults[0]
    return [got[0] for _, got, _ in answer], answer[-1][2] - answer[0][2], epoch


def feed(
    epoch: Epoch,
    tasks: SimpleQueue[ResolvedStep | None],
    prompts: Prompts,
    length: int,
    tokens: int,
    rows: int,
) -> None:
    """The gateway's part: announces steps, one ahead of the one in flight."""
    answer: list[tuple[int, list[int], float]] = threading.current_thread().answer  # type: ignore[attr-defined]
    number = 0

    def announce(**work: Any) -> None:
        nonlocal number
        number += 1
        resolved = epoch.announce(control.Step(number=number, **work))
        assert resolved is not None
        tasks.put(resolved)

    for row in range(1, rows + 1):
        for start in range(0, length, CHUNK):
            end = min(length, start + CHUNK)
            size = params.BLOCK if start == 0 else 0
            chunk = control.Chunk(row=row, start=start, end=end, prompt_tokens=length, params_bytes=size)
            announce(prefill=control.Prefill(chunks=[chunk]))
        if row < rows:
            prompts.done.get()
    admits = [control.Change(admit=control.Admit(row=row, lane=0)) for row in range(1, rows + 1)]
    announce(changes=admits, decode=control.Decode(lane=0))
    announced = 2
    while len(answer) < tokens:
        if announced < tokens:
            announce(decode=control.Decode(lane=0))
            announced += 1
        got = prompts.done.get()
        if got[0] == 0:
            break
        answer.append(got)
    tasks.put(None)


def run_plain(
    model: Any, prompt: list[int], tokens: int, quantization: CacheQuantization | None
) -> tuple[list[int], float]:
    """The same by mlx_lm.generate.generate_step, its caches quantized alike."""
    generate_step = importlib.import_module("mlx_lm.generate").generate_step
    times, answer = [], []
    caches = [quantization.new_cache(one) for one in full_cache(model)] if quantization else None
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens, prompt_cache=caches):
        answer.append(int(token))
        times.append(time.perf_counter())
    return answer, times[-1] - times[0]


def load(source: str, seed: int, kv_bits: int) -> tuple[Stage, int]:
    """The whole model as one stage, and the size of its vocabulary."""
    if Path(source).is_dir():
        model, config = load_lazily(Path(source))
        anatomy = dissect(model, config["model_type"])
        quantization = cache_quantization(model, anatomy.model_type, kv_bits) if kv_bits else None
        stage = Stage(model, anatomy, 0, len(anatomy.layers), quantization=quantization)
        mx.eval(stage.kept)
    else:
        file, _, key = source.partition("#")
        config = json.loads(Path(file).read_bytes())
        config = config[key] if key else config
        stage = random_stage(config, 0, config["num_hidden_layers"], seed=seed, kv_bits=kv_bits)
    return stage, stage.spec.hands_on[0].tail[0]


def run(options: argparse.Namespace) -> Result:
    mlx_lm_import.import_whole()
    sys.setswitchinterval(_SWITCH_SECONDS)
    device.prepare()
    folder = by_name(options.model) if "#" not in options.model else options.model
    stage, vocabulary = load(str(folder), 0, options.kv_bits)
    prompt = np.random.default_rng(0).integers(0, vocabulary, options.prompt).tolist()
    tokens, rows = options.tokens, options.rows
    ours, plain = [], []
    for round_number in range(options.rounds + 1):
        answer, seconds, epoch = run_engine(stage, prompt, tokens, rows)
        expected, plain_seconds = run_plain(stage.model, prompt, tokens, stage.quantization)
        assert answer == expected or rows > 1, "the engine's tokens differ from mlx-lm's"
        if round_number:
            ours.append(seconds / (tokens - 1) * 1000)
            plain.append(plain_seconds / (tokens - 1) * 1000)
    trace = epoch.trace[-tokens // 2 :]
    middle = lambda values: round(statistics.median(values), 4)  # noqa: E731
    return {
        "model": options.model,
        "rows": rows,
        "kv_bits": options.kv_bits,
        "tokens": tokens,
        "engine_ms": middle(ours),
        "mlx_lm_ms": middle(plain),
        "ratio_of_best": round(min(ours) / min(plain), 4),
        "ratio": middle([a / b for a, b in zip(ours, plain, strict=True)]),
        "wait_ms": middle([(t.fed - t.started) * 1000 for t in trace]),
        "build_ms": middle([(t.launched - t.fed) * 1000 for t in trace]),
        "compute_ms": middle([(t.ready - t.launched) * 1000 for t in trace]),
        "send_ms": middle([(t.sent - t.ready) * 1000 for t in trace]),
        "device": str(mx.default_device()),
    }


def tables(result: Result) -> list[Table]:
    return [Table("decode step, ms per token", ["what", "value"], [list(item) for item in result.items()])]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    parts = ("wait_ms", "build_ms", "compute_ms", "send_ms")
    left = 0.0
    for part in parts:
        axes.barh(["engine"], [result[part]], left=[left], label=part)
        left += result[part]
    axes.barh(["mlx-lm"], [result["mlx_lm_ms"]], color="gray")
    axes.set_xlabel("ms per token")
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="demo", help="folder, shape, or CONFIG.json#KEY")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--kv-bits", type=int, choices=(0, 4, 8), default=0)


BENCHMARK = Benchmark(
    "loop",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    quick=("--rounds", "2", "--tokens", "128"),
)
