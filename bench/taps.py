"""What layers that a drafter reads cost steps of rows that do not draft: `python -m bench.taps [SHAPE]`.

Two stages of the same weights compute steps of one token by turns, in another order each time. The layers of
one are tapped, as those of a ring whose tail has a drafter of hidden states. A step is timed by the
processor's own clock, so other processes do not count.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import median, quantiles

from bench.models import SHAPES, random_model

LAYERS, STEPS, TOKENS = 5, 600, 64


def main(name: str = "12x256") -> None:
    """Prints the median milliseconds of both, their ratio, and the ratios of ten parts of the steps."""
    import mlx.core as mx

    from sealring.node.engine import load_stage

    path, count = random_model(SHAPES[name]), SHAPES[name].layers
    stages = {way: load_stage(path, 0, count) for way in ("plain", "tapped", "plain again")}
    stages["tapped"].tap([(count - 2) * place // (LAYERS - 1) for place in range(LAYERS)])
    caches = {way: stage.make_cache() for way, stage in stages.items()}
    token, took = mx.array([[1]], mx.uint32), {way: list[float]() for way in stages}
    for way, stage in stages.items():
        mx.eval(stage([mx.full((1, TOKENS), 1, mx.uint32)], caches[way]))
    choices = random.Random(1)
    for step in range(STEPS):
        for way in choices.sample(list(stages), len(stages)):
            begun = time.thread_time()
            outputs = stages[way]([token], caches[way])
            built = time.thread_time() - begun
            mx.eval(outputs)
            if step > STEPS // 10:
                took[way].append(built)
    for way in ("tapped", "plain again"):
        parts = [median(took[way][at::10]) / median(took["plain"][at::10]) for at in range(10)]
        low, *_, high = quantiles(parts, n=10)
        own, plain = median(took[way]), median(took["plain"])
        print(f"{way}: {1e3 * own:.3f} ms to {1e3 * plain:.3f}, {own / plain:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
