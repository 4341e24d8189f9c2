"""Numbers that are drawn as sizes of prompts and answers are: many small ones, and few large ones."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Drawn:
    """A log-normal number, cut to what lies between `least` and `most`."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, generator: random.Random) -> int:
        return round(
            min(max(generator.lognormvariate(math.log(self.median), self.sigma), self.least), self.most)
        )
