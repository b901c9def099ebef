"""Sparseness and compactness: how few pixels a map spends its attribution on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aha.metrics._base import SampleMean
from aha.metrics._maps import flat_maps, map_states


def sparseness(maps: Tensor) -> Tensor:
    """Gini index of |A| (Chalasani et al. 2020, arXiv 1810.06583): Σᵢ (2i − n − 1)·aᵢ / (n·Σa), a ascending.

    Args:
        maps: ``(batch, 1, H, W)``.

    Returns:
        ``(batch,)`` float64 in [0, 1): 0 for equal values, (n − 1)/n for a single pixel; NaN excluded (an all-zero
        map, or one not finite).

    Example:
        >>> sparseness(torch.tensor([[[[0.0, 0.0], [0.0, 3.0]]], [[[1.0, -1.0], [1.0, 1.0]]]]))
        tensor([0.7500, 0.0000], dtype=torch.float64)
    """
    rows = flat_maps(maps).double().abs()
    finite, _ = map_states(maps)
    ascending = rows.nan_to_num().sort(1).values
    n = rows.shape[1]
    weights = 2 * torch.arange(1, n + 1, dtype=torch.float64, device=rows.device) - n - 1
    total = ascending.sum(1)
    return ((ascending * weights).sum(1) / (n * total)).masked_fill(~finite | (total == 0), torch.nan)


def compactness(maps: Tensor, *, threshold: float = 0.05) -> Tensor:
    """Share of pixels with |A| < threshold · max |A| (arXiv 2312.02364, the authors' notebook).

    Args:
        maps: ``(batch, 1, H, W)``.
        threshold: share of the largest magnitude below which a pixel counts as unused.

    Returns:
        ``(batch,)`` float64 in [0, 1); NaN excluded (an all-zero map, or one not finite).

    Example:
        >>> compactness(torch.tensor([[[[0.0, 0.04], [-1.0, 0.5]]]]))
        tensor([0.5000], dtype=torch.float64)
    """
    rows = flat_maps(maps).abs()
    finite, _ = map_states(maps)
    largest = rows.nan_to_num().amax(1, keepdim=True)
    values = (rows < threshold * largest).double().mean(1)
    return values.masked_fill(~finite | (largest.squeeze(1) == 0), torch.nan)


class Sparseness(SampleMean):
    """Mean Gini index of |A|; higher is sparser. See :func:`sparseness`."""

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def update(self, maps: Tensor) -> None:
        """Add maps ``(batch, 1, H, W)``."""
        self._add(sparseness(maps), map_states(maps)[1])


class Compactness(SampleMean):
    """Mean share of near-zero pixels; higher is more compact. See :func:`compactness`."""

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, *, threshold: float = 0.05, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threshold = threshold

    def update(self, maps: Tensor) -> None:
        """Add maps ``(batch, 1, H, W)``."""
        self._add(compactness(maps, threshold=self.threshold), map_states(maps)[1])
