"""The default: entropic transport of n regions to the K bins between the fractions, in O(K·n), converged.

Prefix masks need no n × n matrix. With widths w_b = p_b − p_{b−1} (p_0 = 0 in front, p = 1 behind) and
anchors a_b = 1 − (p_b + p_{b−1})/2, the plan T (K × n) with marginals w and 1/n and cost −2·s_i·a_b/τ has
the masks M_{p_b} = n·Σ_{b' ≤ b} T[b', :] (entropic optimal transport to quantiles: Cuturi, Teboul & Vert
2019, arXiv 1905.11885; here with the anchors of arXiv 2604.05819).

For n·T = P = softmax over bins of (2·s_i·a_b/τ + f_b) the regions' marginal holds by construction, and
only the K potentials f are unknown: the minimum of the convex Σ_i logsumexp_b(·) − n·Σ_b w_b·f_b. Its
gradient is the residual r − n·w with r_b = Σ_i P_bi (a Sinkhorn step is f += log(n·w) − log r); its Hessian
H = diag(r) − P·Pᵀ is the K × K Laplacian of a graph with weights P·Pᵀ. So: one Sinkhorn step, then Newton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._common import full_precision, perturb, pin_endpoints, prepare


def quantile_sinkhorn(
    scores: Tensor,
    fractions: Tensor | Sequence[float],
    *,
    temperature: float = 0.1,
    noise: float = 0.0,
    iterations: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prefix masks from the transport of regions to fraction bins.

    The bins' marginal (Σ_i M_p[i] = p·n) holds after the default iterations to about 1e-6 of n in float32
    for standardised scores at temperatures from 1 down to 0.001, whatever the bins' widths (1e-5 where
    scores with heavy tails are hundreds of times τ/Δa apart: rounding, not lack of iterations). The
    gradient is the converged plan's, by implicit differentiation: exact at convergence, off in proportion
    to the remaining residual when fewer iterations are asked for. Gradients of gradients are not available.

    A mask depends a little on which other fractions were asked for, since they set the bins; with all
    fractions k/n it is :func:`gumbel_sinkhorn`'s converged one at temperature τ·n/(n − 1). Scores' scale is
    an inverse temperature, their shift does not matter.

    Args:
        scores: (B, n), higher = more important.
        fractions: (K,) non-decreasing in [0, 1], with or without end points, repeats allowed.
        temperature: τ > 0.
        noise: Gumbel(0, 1)·noise·τ is added to the scores.
        iterations: updates of the potentials, the first by Sinkhorn, the others by Newton; 8 when None.
        generator: source of the noise.

    Returns:
        Masks (B, K, n) in [0, 1].

    Raises:
        ValueError: see :func:`aha.softsort.prefix_masks`.
    """
    scores, fractions = prepare(scores, fractions, temperature=temperature, noise=noise, iterations=iterations)
    with full_precision(scores.device):
        scores = perturb(scores, scale=noise * temperature, generator=generator)
        return _QuantileTransport.apply(scores, fractions, temperature, 8 if iterations is None else iterations)


class _QuantileTransport(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, fractions: Tensor, temperature: float, iterations: int) -> Tensor:
        ends = torch.cat([fractions.new_zeros(1), fractions, fractions.new_ones(1)])
        widths = (ends[1:] - ends[:-1]).to(scores, non_blocking=True)
        slopes = ((2 - ends[1:] - ends[:-1]) / temperature).to(scores, non_blocking=True)  # 2·a_b/τ
        centred = scores - scores.mean(dim=1, keepdim=True)
        potentials = _hard_potentials(centred, fractions, slopes)
        # Bins without width (repeats, end points) take nothing and are left out of the system.
        empty = widths <= 0
        marginal = (widths * scores.shape[1]).masked_fill(empty, 1.0)
        potentials = potentials.masked_fill(empty, -torch.inf)
        for step in range(iterations):
            plan = _plan(centred, slopes, potentials)
            rows = plan.sum(dim=2).masked_fill(empty, 1.0)
            if step == 0:
                potentials = potentials + marginal.log() - rows.log()
            else:
                direction = _solve(_hessian_factor(plan, marginal), marginal - rows, widths)
                potentials = potentials + _damping(direction) * direction
        plan = _plan(centred, slopes, potentials)
        ends = ((fractions <= 0) | (fractions >= 1)).to(scores.device, non_blocking=True)
        ctx.save_for_backward(plan, slopes, widths, marginal, ends)
        return pin_endpoints(plan[:, :-1].cumsum(dim=1), fractions)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        plan, slopes, widths, marginal, ends = ctx.saved_tensors
        with full_precision(plan.device):
            gradient = gradient.masked_fill(ends[:, None], 0.0)
            # A bin's share counts in its own mask and in all later ones; the last bin is in none.
            to_plan = torch.zeros_like(plan)
            to_plan[:, :-1] = gradient.flip(1).cumsum(dim=1).flip(1)
            to_logits = _softmax_backward(plan, to_plan)
            # Potentials follow the scores such that the rows stay put: H·df = −(change of the rows).
            factor, rows = _hessian_factor(plan, marginal), to_logits.sum(dim=2)
            pull = _solve(factor, rows, widths)
            # One refinement, its residual without matrix products: those may be TF32 on a GPU.
            pulled = _softmax_backward(plan, pull[:, :, None])
            correction = _solve(factor, rows - pulled.sum(dim=2), widths)
            to_logits = to_logits - pulled - _softmax_backward(plan, correction[:, :, None])
            return (to_logits * slopes[:, None]).sum(dim=1), None, None, None


def _plan(centred: Tensor, slopes: Tensor, potentials: Tensor) -> Tensor:
    """n·T = softmax over bins of s_i·2a_b/τ + f_b. Shape: (B, n), (K,), (B, K) -> (B, K, n)."""
    logits = torch.addcmul(potentials[:, :, None], centred[:, None, :], slopes[:, None])
    return torch.softmax(logits, dim=1)


def _softmax_backward(plan: Tensor, gradient: Tensor) -> Tensor:
    """Gradient with respect to the plan's logits. Shape: (B, K, n), (B, K, n or 1) -> (B, K, n)."""
    weighted = plan * gradient
    return weighted.addcmul_(plan, weighted.sum(dim=1, keepdim=True), value=-1)


def _hessian_factor(plan: Tensor, marginal: Tensor) -> Tensor:
    """Cholesky factor of H plus a ridge at rounding level, which fixes the free constant of the potentials.

    The diagonal is summed from the weights, not subtracted from r: no cancellation where the plan is nearly
    hard.

    Shape: (B, K, n), (K,) -> (B, K, K).
    """
    weights = plan @ plan.transpose(1, 2)
    weights.diagonal(dim1=1, dim2=2).zero_()
    ridge = 10 * torch.finfo(plan.dtype).eps * marginal
    return torch.linalg.cholesky_ex(torch.diag_embed(weights.sum(dim=2) + ridge) - weights).L


def _solve(factor: Tensor, right: Tensor, widths: Tensor) -> Tensor:
    """Solve L·Lᵀ·x = right, with x's mean weighted by the widths at 0 (its constant is free).

    The right side sums to 0 but for rounding, which the ridge would blow up to a large constant: removed.

    Shape: (B, K, K), (B, K), (K,) -> (B, K).
    """
    right = right - right.sum(dim=1, keepdim=True) * widths
    return torch.cholesky_solve(right[:, :, None], factor).squeeze(2)


def _damping(direction: Tensor) -> Tensor:
    """Newton step length log(1 + R)/R, R the range of the direction: descent without a line search.

    Along a direction of range R the objective's third derivative is at most R times its second (generalised
    self-concordance of logistic losses, Bach 2010, arXiv 0910.4627); this length minimises the resulting
    bound, and tends to 1, so convergence stays quadratic.

    Shape: (B, K) -> (B, 1).
    """
    reach = (direction.amax(dim=1, keepdim=True) - direction.amin(dim=1, keepdim=True)).clamp(min=1e-6)
    return torch.log1p(reach) / reach


def _hard_potentials(centred: Tensor, fractions: Tensor, slopes: Tensor) -> Tensor:
    """Potentials that are exact as τ → 0: neighbouring bins meet at the score of rank p·n.

    Where p·n falls inside a region, the region is split in that proportion; where it falls between two
    regions, the bins meet half-way between their scores.

    Shape: (B, n), (K,), (K + 1,) -> (B, K + 1).
    """
    batch, regions = centred.shape
    ordered = centred.sort(dim=1, descending=True).values
    position = fractions * regions
    rank = position.floor().clamp(max=regions - 1)
    share = torch.logit((position - rank).clamp(1e-6, 1 - 1e-6)).to(centred, non_blocking=True)
    rank = rank.long().to(centred.device, non_blocking=True)
    score = ordered[:, rank]
    upper = (score + ordered[:, (rank - 1).clamp(min=0)]) / 2
    lower = (score + ordered[:, (rank + 1).clamp(max=regions - 1)]) / 2
    fall = slopes[:-1] - slopes[1:]
    steps = (fall * score - share).clamp(fall * lower, fall * upper)
    return torch.cat([centred.new_zeros(batch, 1), steps.cumsum(dim=1)], dim=1)
