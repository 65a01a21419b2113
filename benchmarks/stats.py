"""Medians, and intervals by the bootstrap over paired rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

__all__ = ["interval", "median"]

median = statistics.median
RESAMPLES = 4000
SEED = 20_240_229  # the same samples give the same interval


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the median of `values` (one value a round)."""
    if len(values) < 2:
        return values[0], values[0]
    draw = random.Random(SEED)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    return medians[int(tail * RESAMPLES)], medians[int((1 - tail) * RESAMPLES) - 1]
