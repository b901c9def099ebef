"""What every metric asks of maps and masks first."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_maps(maps: Tensor) -> Tensor:
    """Maps ``(batch, 1, H, W)`` as rows ``(batch, H·W)``, float32 (float64 is kept).

    Raises:
        ValueError: for another shape.
    """
    if maps.ndim != 4 or maps.shape[1] != 1:
        msg = f"maps must be (batch, 1, height, width), got {tuple(maps.shape)}."
        raise ValueError(msg)
    rows = maps.flatten(1)
    return rows if rows.dtype == torch.float64 else rows.float()


def flat_masks(masks: Tensor, maps: Tensor) -> Tensor:
    """Object masks as bool rows ``(batch, H·W)``; of the same shape as the maps.

    Raises:
        ValueError: for another shape, naming both.
    """
    if masks.shape != maps.shape:
        msg = f"masks must have the shape of the maps {tuple(maps.shape)}, got {tuple(masks.shape)}."
        raise ValueError(msg)
    return masks.flatten(1).to(maps.device) > 0


def map_states(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Which maps are finite, and which of those are constant (rank nothing): ``(batch,)`` bool each."""
    rows = flat_maps(maps)
    finite = rows.isfinite().all(1)
    return finite, finite & (rows == rows[:, :1]).all(1)
