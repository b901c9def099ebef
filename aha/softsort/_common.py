"""What every relaxation shares: checks at the door, Gumbel noise, weights that cut ranks at a fraction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def prepare(
    scores: Tensor,
    fractions: Tensor | Sequence[float],
    *,
    temperature: float,
    noise: float,
    iterations: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments and bring them to working precision.

    Half precision is cast up to float32, float64 stays float64. What depends on the fractions alone is
    worked out on their device and uploaded with non_blocking=True, so that the host need not wait for the
    accelerator. Nothing here reads a value back from an accelerator: non-finite scores are not looked for
    (they come out as NaN masks of that sample), and the values of fractions that already live on an
    accelerator are not checked.

    Args:
        scores: (B, n) floating point.
        fractions: (K,) non-decreasing, in [0, 1].
        temperature: positive.
        noise: non-negative.
        iterations: None or a non-negative count.

    Returns:
        Scores (B, n) in float32 or float64, and fractions (K,): float64 on the CPU, or as they are on their
        device.

    Raises:
        ValueError: if a shape or value is out of range.
    """
    if scores.ndim != 2 or 0 in scores.shape:
        msg = f"scores must have shape (batch, regions) with at least one of each, got {tuple(scores.shape)}"
        raise ValueError(msg)
    if not scores.is_floating_point():
        msg = f"scores must be floating point, got {scores.dtype}; call .float() first"
        raise ValueError(msg)
    on_cpu = not isinstance(fractions, Tensor) or fractions.device.type == "cpu"
    fractions = torch.as_tensor(fractions, dtype=torch.float64 if on_cpu else None).detach()
    if fractions.ndim != 1 or len(fractions) == 0:
        msg = f"fractions must have shape (K,) with K of at least 1, got {tuple(fractions.shape)}"
        raise ValueError(msg)
    if on_cpu:
        values = fractions.tolist()
        if not all(0.0 <= value <= 1.0 for value in values):
            msg = f"fractions must lie in [0, 1], got {values}"
            raise ValueError(msg)
        if any(later < earlier for earlier, later in zip(values, values[1:], strict=False)):
            msg = f"fractions must not decrease, got {values}; sort them first"
            raise ValueError(msg)
    if not (temperature > 0 and math.isfinite(temperature)):
        msg = f"temperature must be positive and finite, got {temperature}"
        raise ValueError(msg)
    if not (noise >= 0 and math.isfinite(noise)):
        msg = f"noise must be finite and at least 0, got {noise}"
        raise ValueError(msg)
    if iterations is not None and iterations < 0:
        msg = f"iterations must be at least 0, got {iterations}"
        raise ValueError(msg)
    return scores if scores.dtype == torch.float64 else scores.float(), fractions


def full_precision(device: torch.device) -> torch.autocast:
    """Switch autocast off: sorting in half precision has a floor of about 0.02 in the marginals."""
    return torch.autocast(device_type=device.type, enabled=False)


def gumbel(shape: Sequence[int], *, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard Gumbel draws, dtype and device of `like`, drawn on the device of `generator` when given."""
    device = like.device if generator is None else generator.device
    draws = torch.empty(tuple(shape), dtype=like.dtype, device=device).exponential_(generator=generator)
    return draws.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_().to(like.device)


def perturb(scores: Tensor, *, scale: float, generator: torch.Generator | None) -> Tensor:
    """Scores (B, n) plus `scale` times Gumbel(0, 1); untouched when the scale is 0."""
    return scores if scale == 0 else scores + scale * gumbel(scores.shape, like=scores, generator=generator)


def rank_weights(fractions: Tensor, regions: int, *, like: Tensor) -> Tensor:
    """Share of each rank that lies before a fraction: clamp(p·n − k, 0, 1), ranks k = 0..n−1.

    Multiplied with a (soft) permutation this is the cumulative sum of its first rows, linear between
    whole ranks: (1 − α)·C_m + α·C_{m+1} with m = floor(p·n), α = p·n − m (arXiv 2604.05819, authors' code).

    Shape: (K,) -> (K, n).
    """
    ranks = torch.arange(regions, dtype=fractions.dtype, device=fractions.device)
    return (fractions[:, None] * regions - ranks).clamp(0, 1).to(like, non_blocking=True)


def pin_endpoints(masks: Tensor, fractions: Tensor) -> Tensor:
    """Masks (B, K, n) kept in [0, 1], exactly 0 at p = 0 and 1 at p = 1; no gradient where it acts."""
    none = (fractions <= 0)[:, None].to(masks.device, non_blocking=True)
    all_ = (fractions >= 1)[:, None].to(masks.device, non_blocking=True)
    return masks.clamp(0, 1).masked_fill(none, 0.0).masked_fill(all_, 1.0)
