"""How soft a soft sort is: what its masks miss of the wanted area, and how far they are from hard ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common import prepare, rank_weights


def hard_prefix_masks(scores: Tensor, fractions: Tensor | Sequence[float]) -> Tensor:
    """Masks of the hard ranking, the limit of every relaxation as τ → 0 for distinct scores.

    The ⌊p·n⌋ highest scores are in, the next one with the remaining share of p·n; ties go to the lower
    index. No gradient.

    Shape: (B, n), (K,) -> (B, K, n), float32 or float64 as the scores.
    """
    scores, fractions = prepare(scores.detach(), fractions, temperature=1.0, noise=0.0)
    order = scores.argsort(dim=1, descending=True, stable=True)
    by_rank = rank_weights(fractions, scores.shape[1], like=scores)
    return by_rank.T[order.argsort(dim=1)].transpose(1, 2).contiguous()


def marginal_residual(masks: Tensor, fractions: Tensor | Sequence[float]) -> Tensor:
    """Largest |Σ_i M_p[i] − p·n| / n over batch and fractions, a share of all regions; 0 is ideal.

    Args:
        masks: (B, K, n).
        fractions: (K,) that the masks were made for.

    Returns:
        A scalar, on the masks' device, without gradient.
    """
    wanted = torch.as_tensor(fractions).to(masks.device, torch.promote_types(masks.dtype, torch.float32))
    return (masks.detach().to(wanted.dtype).mean(dim=2) - wanted).abs().max()


def soft_to_hard_gap(masks: Tensor, scores: Tensor, fractions: Tensor | Sequence[float]) -> Tensor:
    """Mean |soft − hard| over the batch, fractions and regions: 0 for hard masks, at most about 1/2.

    Args:
        masks: (B, K, n) soft masks.
        scores: (B, n) that they were made from, without noise.
        fractions: (K,).

    Returns:
        A scalar, on the masks' device, without gradient.
    """
    hard = hard_prefix_masks(scores, fractions)
    return (masks.detach().to(hard) - hard).abs().mean()
