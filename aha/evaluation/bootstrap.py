"""Bootstrap intervals of means, for many columns at once and with samples missing here and there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
_CHUNK_ELEMENTS = 8_000_000  # weights held in memory at a time


class Means(NamedTuple):
    """Means over samples with their percentile intervals; one entry per column, NaN where a column is empty."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def bootstrap_means(values: np.ndarray, *, resamples: int = RESAMPLES, level: float = 0.95, seed: int = 0) -> Means:
    """Mean of every column and its bootstrap percentile interval (Efron 1979).

    All columns share the resamples, which depend on ``seed`` and the number of samples alone. So the interval of a
    column of differences is the paired interval, and columns can be computed together or apart.

    Args:
        values: ``(samples, columns)``, float64; NaN for a sample that a column doesn't have.
        resamples: number of bootstrap resamples.
        level: of confidence.
        seed: of the resamples.

    Raises:
        ValueError: for another shape, or a level outside (0, 1).

    Example:
        >>> means = bootstrap_means(np.array([[0.0], [1.0], [1.0], [np.nan]]))
        >>> float(means.value[0]), int(means.n[0])
        (0.6666666666666666, 3)
    """
    if values.ndim != 2:
        msg = f"values must be (samples, columns), got shape {values.shape}."
        raise ValueError(msg)
    if not 0 < level < 1:
        msg = f"level must lie between 0 and 1, got {level}."
        raise ValueError(msg)
    samples, columns = values.shape
    present = ~np.isnan(values)
    filled = np.where(present, values, 0.0)
    n = present.sum(0)
    value = _ratio(filled.sum(0), n)
    if samples == 0 or resamples == 0:
        return Means(value, value.copy(), value.copy(), n)
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, columns))
    step = max(1, _CHUNK_ELEMENTS // samples)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        draws = rng.integers(samples, size=(rows, samples))
        draws += np.arange(rows)[:, None] * samples
        weights = np.bincount(draws.ravel(), minlength=rows * samples).reshape(rows, samples).astype(np.float64)
        means[start : start + rows] = _ratio(weights @ filled, weights @ present.astype(np.float64))
    low, high = np.full(columns, np.nan), np.full(columns, np.nan)
    some = n > 0
    if some.any():  # a resample may miss every sample that a sparse column has: nanquantile passes over it
        tail = (1 - level) / 2
        low[some], high[some] = np.nanquantile(means[:, some], [tail, 1 - tail], axis=0)
    return Means(value, low, high, n)


def _ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, total / count, np.nan)
