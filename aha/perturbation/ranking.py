"""Hard ranking of pixels: which are deleted first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pixel_ranks(maps: Tensor) -> Tensor:
    """Rank of every pixel, 0 = most important; ties keep row-major order (stable sort), float32 throughout.

    NaN counts as least important, so that a broken map can't win by its broken pixels.

    Args:
        maps: ``(batch, 1, H, W)``, signed.

    Returns:
        ``(batch, H·W)``, int64.
    """
    flat = maps.flatten(1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    flat = flat.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = flat.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def fractions_to_counts(fractions: Sequence[float] | Tensor, pixels: int) -> list[int]:
    """How many pixels each fraction of an image stands for, rounded to the nearest."""
    counts = [round(float(p) * pixels) for p in fractions]
    if any(not 0 <= count <= pixels for count in counts):
        msg = f"fractions must lie in [0, 1], got {list(map(float, fractions))}."
        raise ValueError(msg)
    return counts


def auc(values: Tensor, fractions: Tensor) -> Tensor:
    """Area under curves by the trapezoid rule, float32.

    Args:
        values: ``(…, K)``.
        fractions: ``(K,)``, increasing.

    Returns:
        ``(…)``.
    """
    return torch.trapezoid(values.float(), fractions.to(values.device).float(), dim=-1)
