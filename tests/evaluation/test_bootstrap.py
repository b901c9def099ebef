from __future__ import annotations

import numpy as np
import pytest

from aha.evaluation.bootstrap import bootstrap_means


def slow(column: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """One column, one resample at a time; a resample keeps a missing value missing."""
    rng = np.random.default_rng(seed)
    means = [np.nanmean(column[rng.integers(len(column), size=len(column))]) for _ in range(resamples)]
    return np.quantile(means, 0.025), np.quantile(means, 0.975)


def test_equals_a_loop_over_resamples() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(40, 3))
    values[::7, 1] = np.nan
    means = bootstrap_means(values, resamples=200, seed=5)
    for j in range(3):
        low, high = slow(values[:, j], 200, 5)
        assert means.value[j] == pytest.approx(np.nanmean(values[:, j]), abs=1e-12)
        assert (means.low[j], means.high[j]) == pytest.approx((low, high), abs=1e-12)
    assert means.n.tolist() == [40, 34, 40]


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(30, 2))
    whole = bootstrap_means(values, resamples=50)
    monkeypatch.setattr("aha.evaluation.bootstrap._CHUNK_ELEMENTS", 70)
    for a, b in zip(whole, bootstrap_means(values, resamples=50), strict=True):
        assert np.allclose(a, b, atol=1e-14)


def test_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    means = bootstrap_means(rng.exponential(size=(60, 400)), resamples=400)
    covered = np.mean((means.low <= 1) & (means.high >= 1))
    assert 0.9 < covered < 0.97


def test_paired_interval_is_narrower_than_that_of_unrelated_samples() -> None:
    rng = np.random.default_rng(2)
    hard = rng.normal(size=100)
    a, b = hard + 0.1 + 0.05 * rng.normal(size=100), hard
    means = bootstrap_means(np.stack([a - b, a, b], 1))
    assert 0.05 < means.low[0] < 0.1 < means.high[0] < 0.15
    assert means.high[0] - means.low[0] < 0.2 * (means.high[1] - means.low[1])


def test_empty_single_and_excluded_columns() -> None:
    means = bootstrap_means(np.array([[2.0, np.nan]]))
    assert (means.value[0], means.low[0], means.high[0]) == (2, 2, 2)
    assert np.isnan(means.value[1]) and np.isnan(means.low[1]) and means.n[1] == 0
    assert np.isnan(bootstrap_means(np.zeros((0, 1))).value[0])
    with pytest.raises(ValueError, match="samples, columns"):
        bootstrap_means(np.zeros(3))
