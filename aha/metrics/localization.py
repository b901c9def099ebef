"""Pointing game and energy pointing: does the map lie on the object?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aha.metrics._base import SampleMean
from aha.metrics._maps import flat_maps, flat_masks, map_states


def pointing_game(maps: Tensor, masks: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """Whether the maximum of each map lies in the object (Zhang et al. 2016, arXiv 1608.00507).

    Args:
        maps: ``(batch, 1, H, W)``. Of equal maxima the first in row-major order counts.
        masks: ``(batch, 1, H, W)``, non-zero = object.
        tolerance: a maximum this many pixels off the object still hits; the published benchmarks use 15.

    Returns:
        ``(batch,)`` float64: 1 hit, 0 miss (a constant map points nowhere: a miss), NaN excluded (empty object, or a
        map that is not finite).

    Example:
        >>> maps = torch.tensor([[[[0.1, 0.9], [0.2, 0.3]]], [[[0.5, 0.1], [0.2, 0.3]]]])
        >>> masks = torch.tensor([[[[0, 1], [0, 0]]], [[[0, 1], [0, 1]]]])
        >>> pointing_game(maps, masks)
        tensor([1., 0.], dtype=torch.float64)
        >>> pointing_game(maps, masks, tolerance=1)
        tensor([1., 1.], dtype=torch.float64)
    """
    rows, inside = flat_maps(maps), flat_masks(masks, maps)
    finite, constant = map_states(maps)
    peak = rows.nan_to_num().argmax(1, keepdim=True)
    if tolerance > 0:
        width = maps.shape[-1]
        places = torch.arange(rows.shape[1], device=rows.device)
        down = places.div(width, rounding_mode="floor") - peak.div(width, rounding_mode="floor")
        across = places % width - peak % width
        hit = (inside & (down**2 + across**2 <= tolerance**2)).any(1)
    else:
        hit = inside.gather(1, peak).squeeze(1)
    values = (hit & ~constant).double()
    return values.masked_fill(~finite | ~inside.any(1), torch.nan)


def energy_pointing(maps: Tensor, masks: Tensor) -> Tensor:
    """Share of the positive attribution that lies in the object (Wang et al. 2020, arXiv 1910.01279).

    Args:
        maps: ``(batch, 1, H, W)``; negative values count as zero.
        masks: ``(batch, 1, H, W)``, non-zero = object.

    Returns:
        ``(batch,)`` float64 in [0, 1]; NaN excluded (empty object, no positive attribution, or a map not finite).

    Example:
        >>> energy_pointing(torch.tensor([[[[1.0, 2.0], [-4.0, 1.0]]]]), torch.tensor([[[[1, 1], [1, 0]]]]))
        tensor([0.7500], dtype=torch.float64)
    """
    rows, inside = flat_maps(maps).double().clamp(min=0), flat_masks(masks, maps)
    finite, _ = map_states(maps)
    total = rows.sum(1)
    values = (rows * inside).sum(1) / total
    return values.masked_fill(~finite | ~inside.any(1) | (total == 0), torch.nan)


class PointingGame(SampleMean):
    """Share of maps whose maximum lies in the object; higher is better. See :func:`pointing_game`.

    Example:
        >>> metric = PointingGame()
        >>> metric.update(torch.tensor([[[[0.1, 0.9]]], [[[0.2, 0.1]]]]), torch.tensor([[[[0, 1]]], [[[0, 0]]]]))
        >>> metric.compute(), metric.excluded
        (tensor(1., dtype=torch.float64), tensor(1))
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, *, tolerance: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tolerance = tolerance

    def update(self, maps: Tensor, masks: Tensor) -> None:
        """Add maps and masks, ``(batch, 1, H, W)`` both."""
        self._add(pointing_game(maps, masks, tolerance=self.tolerance), map_states(maps)[1])


class EnergyPointing(SampleMean):
    """Mean share of positive attribution in the object; higher is better. See :func:`energy_pointing`."""

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def update(self, maps: Tensor, masks: Tensor) -> None:
        """Add maps and masks, ``(batch, 1, H, W)`` both."""
        self._add(energy_pointing(maps, masks), map_states(maps)[1])
