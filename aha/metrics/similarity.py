"""How alike two maps are: rank correlation and structural similarity, per sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from aha.metrics._maps import flat_maps, map_states


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation of two batches of maps, ties at their mean rank.

    Args:
        first: ``(batch, 1, H, W)``.
        second: same shape.

    Returns:
        ``(batch,)`` float64 in [−1, 1]; NaN where a map is constant or not finite.

    Example:
        >>> rank_correlation(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[1.0, 9.0, 4.0]]]]))
        tensor([0.5000], dtype=torch.float64)
    """
    _check(first, second)
    a, b = _mean_ranks(flat_maps(first)), _mean_ranks(flat_maps(second))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    value = (a * b).sum(1) / ((a * a).sum(1) * (b * b).sum(1)).sqrt()
    return value.clamp(-1, 1).masked_fill(~_both_rank(first, second), torch.nan)


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """SSIM of two batches of maps, each scaled to [0, 1] (11 taps, σ 1.5).

    Args:
        first: ``(batch, 1, H, W)``.
        second: same shape.

    Returns:
        ``(batch,)`` float64; NaN where a map is constant or not finite.
    """
    _check(first, second)
    use = _both_rank(first, second)
    values = torch.full((len(first),), torch.nan, dtype=torch.float64, device=first.device)
    if use.any():
        pair = [_unit(maps[use]) for maps in (first, second)]
        score = structural_similarity_index_measure(*pair, data_range=1.0, reduction="none")
        values[use] = score.reshape(-1).double()
    return values


def _check(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        msg = f"maps must have one shape to be compared, got {tuple(first.shape)} and {tuple(second.shape)}."
        raise ValueError(msg)


def _both_rank(first: Tensor, second: Tensor) -> Tensor:
    states = [map_states(maps) for maps in (first, second)]
    return states[0][0] & ~states[0][1] & states[1][0] & ~states[1][1]


def _unit(maps: Tensor) -> Tensor:
    maps = maps.double()
    low, high = maps.amin((1, 2, 3), keepdim=True), maps.amax((1, 2, 3), keepdim=True)
    return (maps - low) / (high - low)


def _mean_ranks(rows: Tensor) -> Tensor:
    """Ranks of each row's values, 0 = lowest, equal values at the mean of their places; float64."""
    ordered, order = rows.sort(1)
    group = torch.zeros_like(order)
    group[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    places = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device).expand(rows.shape)
    zeros = torch.zeros_like(places)
    sums, sizes = zeros.scatter_add(1, group, places), zeros.scatter_add(1, group, torch.ones_like(places))
    means = (sums / sizes.clamp(min=1)).gather(1, group)
    return torch.zeros_like(places).scatter(1, order, means)
