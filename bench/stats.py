"""Means, and the intervals that say how much of a difference is chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, two-sided 95 %, by degrees of freedom (any statistics table).
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
T95_BEYOND = 2.131  # for more degrees of freedom: a little too wide, never too narrow


class Estimate(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Estimate:
    """Mean and t interval. Without limits for a single value: nothing is known about its spread."""
    if len(values) < 2:
        return Estimate(values[0], -math.inf, math.inf)
    t = T95[len(values) - 2] if len(values) - 2 < len(T95) else T95_BEYOND
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return Estimate(mean, mean - half, mean + half)


def ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Second over first of each pair: geometric mean, and a paired t interval on the logarithms."""
    logs = interval([math.log(second / first) for first, second in pairs])
    return Estimate(*(math.exp(value) for value in logs))


def difference(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Second minus first of each pair: mean and paired t interval."""
    return interval([second - first for first, second in pairs])


def slope(values: Sequence[float]) -> float:
    """Growth from one value to the next, by least squares; 0 for less than two."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope
