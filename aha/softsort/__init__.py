"""Soft sorting: differentiable prefix masks from region scores, one small file per relaxation.

All work in float32 (float64 for float64 scores) in the log domain, whatever autocast says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .diagnostics import hard_prefix_masks, marginal_residual, soft_to_hard_gap
from .gumbel_sinkhorn import gumbel_sinkhorn
from .lapsum import lapsum
from .quantile_sinkhorn import quantile_sinkhorn
from .softsort import softsort

METHODS = {
    "quantile_sinkhorn": quantile_sinkhorn,
    "lapsum": lapsum,
    "softsort": softsort,
    "gumbel_sinkhorn": gumbel_sinkhorn,
}

__all__ = [
    "METHODS",
    "gumbel_sinkhorn",
    "hard_prefix_masks",
    "lapsum",
    "marginal_residual",
    "prefix_masks",
    "quantile_sinkhorn",
    "soft_to_hard_gap",
    "softsort",
]


def prefix_masks(
    scores: Tensor,
    fractions: Tensor | Sequence[float],
    *,
    method: str = "quantile_sinkhorn",
    temperature: float = 0.1,
    noise: float = 0.0,
    iterations: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Soft masks of the most important fraction p of the regions, for every p.

    Non-finite scores do not raise, since looking for them would stall an accelerator: that sample's masks
    (except p = 0 and p = 1) come out as NaN. Fractions on the CPU are checked; on an accelerator they are
    trusted.

    Args:
        scores: (B, n), any real scale, higher = more important = masked first. Half precision is cast up.
        fractions: (K,) non-decreasing in [0, 1]. No gradient flows to them.
        method: a key of `METHODS`.
        temperature: τ > 0. What softness it gives depends on the method and on the scale of the scores.
        noise: Gumbel noise: of scale noise·τ on the scores, or for "gumbel_sinkhorn" of scale noise on its
            n × n logits before the division by τ (the paper: 1.0). 0 is deterministic.
        iterations: the method's own default when None.
        generator: source of the noise; its device may differ from the scores'.

    Returns:
        Masks (B, K, n) in [0, 1], float32 or float64; exactly 0 at p = 0 and 1 at p = 1, growing with p, with
        Σ_i M_p[i] = p·n up to what :func:`marginal_residual` tells.

    Raises:
        ValueError: for an unknown method, scores that are not (B, n) floating point, fractions out of range
            or order, a temperature that is not positive, or negative noise or iterations.

    Example:
        >>> scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> prefix_masks(scores, [0.0, 0.5, 1.0], temperature=0.01).round(decimals=3)
        tensor([[[0., 0., 0., 0.],
                 [1., 0., 1., 0.],
                 [1., 1., 1., 1.]]])
    """
    if method not in METHODS:
        msg = f"unknown soft sort {method!r}; choose one of {', '.join(METHODS)}"
        raise ValueError(msg)
    return METHODS[method](
        scores, fractions, temperature=temperature, noise=noise, iterations=iterations, generator=generator
    )
