"""LapSum: a prefix mask is a Laplace sigmoid around a threshold found in closed form. O(n log n + K·n)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._common import full_precision, perturb, pin_endpoints, prepare


def lapsum(
    scores: Tensor,
    fractions: Tensor | Sequence[float],
    *,
    temperature: float = 0.1,
    noise: float = 0.0,
    iterations: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prefix masks M_p[i] = F((s_i − b_p) / τ), F the Laplace distribution, b_p such that Σ_i M_p[i] = p·n.

    The soft top-k of LapSum (Struski et al. 2025, arXiv 2503.06242), one per fraction. The threshold b_p is
    exact (closed form on the sorted scores), its gradient is exact too, by implicit differentiation: db =
    Σ_i f_i ds_i / Σ_i f_i with f = F'. Gradients of gradients are not available.

    Args:
        scores: (B, n), higher = more important.
        fractions: (K,) non-decreasing in [0, 1].
        temperature: τ > 0, in units of the scores.
        noise: Gumbel(0, 1)·noise·τ is added to the scores.
        iterations: must be None, there is nothing to iterate.
        generator: source of the noise.

    Returns:
        Masks (B, K, n) in [0, 1].

    Raises:
        ValueError: if iterations are asked for; else see :func:`aha.softsort.prefix_masks`.
    """
    if iterations is not None:
        msg = f"lapsum is solved in closed form and takes no iterations, got {iterations}; leave it out"
        raise ValueError(msg)
    scores, fractions = prepare(scores, fractions, temperature=temperature, noise=noise)
    with full_precision(scores.device):
        scores = perturb(scores, scale=noise * temperature, generator=generator)
        return _LapSum.apply(scores, fractions, temperature)


class _LapSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, fractions: Tensor, temperature: float) -> Tensor:
        # Scores in units of τ and around their mean, where rounding is smallest (masks are shift-invariant).
        scaled = (scores - scores.mean(dim=1, keepdim=True)) / temperature
        distance = scaled[:, None, :] - solve_shift(scaled, fractions)[:, :, None]
        density = 0.5 * torch.exp(-distance.abs())
        masks = torch.where(distance > 0, 1 - density, density)
        inside = ((fractions > 0) & (fractions < 1)).to(scores.device, non_blocking=True)
        ctx.save_for_backward(density.masked_fill(~inside[:, None], 0.0))
        ctx.temperature = temperature
        return pin_endpoints(masks, fractions)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (density,) = ctx.saved_tensors
        with full_precision(density.device):
            # All densities of a mask vanish where it is hard: its gradient is 0 there, not 0/0.
            total = density.sum(dim=2, keepdim=True).clamp(min=torch.finfo(density.dtype).tiny)
            shift = (density * gradient).sum(dim=2, keepdim=True) / total
            return (density * (gradient - shift)).sum(dim=1) / ctx.temperature, None, None


def solve_shift(scaled: Tensor, fractions: Tensor) -> Tensor:
    """Thresholds b with Σ_i F(x_i − b) = p·n, in closed form.

    Between two neighbouring scores the sum is (number above) − e^{A+b}/2 + e^{B−b}/2 with A, B the
    logsumexp of −x above and of x below, a quadratic in e^b. The interval comes from the sum's values at
    the scores themselves.

    Shape: (B, n), (K,) -> (B, K); ±inf or NaN are possible at p = 0 and 1, whose masks need no threshold.
    """
    batch, regions = scaled.shape
    ascending = scaled.sort(dim=1).values
    below = ascending.logcumsumexp(dim=1)
    above = (-ascending).flip(1).logcumsumexp(dim=1).flip(1)
    wanted = (fractions * regions).to(scaled, non_blocking=True).expand(batch, -1).contiguous()
    # At b = x_(j) a score above counts 1 − e^{b−x}/2, one below e^{x−b}/2, and x_(j) itself 1/2 by both.
    number_above = torch.arange(regions, 0, -1, dtype=scaled.dtype, device=scaled.device)
    at_scores = number_above - 0.5 * (above + ascending).exp() + 0.5 * (below - ascending).exp() - 0.5
    # The sum falls as b grows: the first score where it is below the wanted one ends the interval of b.
    interval = torch.searchsorted(-at_scores.cummin(dim=1).values, -wanted)
    infinite = scaled.new_full((batch, 1), -torch.inf)
    log_above = torch.cat([above, infinite], dim=1).gather(1, interval)
    log_below = torch.cat([infinite, below], dim=1).gather(1, interval)
    excess = regions - interval - wanted
    root = (excess.square() + (log_above + log_below).exp()).sqrt()
    log_root = (excess.abs() + root).log()
    middle = torch.where(excess == 0, (log_below - log_above) / 2, log_below - log_root)
    return torch.where(excess > 0, log_root - log_above, middle)
