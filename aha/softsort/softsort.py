"""SoftSort: distances to the sorted scores as logits, made doubly stochastic by Sinkhorn steps. O(n²)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common import full_precision, perturb, pin_endpoints, prepare, rank_weights


def softsort(
    scores: Tensor,
    fractions: Tensor | Sequence[float],
    *,
    temperature: float = 0.1,
    noise: float = 0.0,
    iterations: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prefix masks from SoftSort (Prillo & Eisenschlos 2020, arXiv 2006.16038).

    P = softmax over regions i of −|sort(s)_k − s_i| / τ, sorted descending; the mask of p is the sum of the
    first p·n rows. SoftSort's columns do not sum to 1: a lone score among clusters is picked less than
    once, a crowded one more, so that its "masks" leave [0, 1] and p = 1 is not everything. Here each of
    `iterations` steps normalises rows and then columns, so columns sum to 1 exactly (masks in [0, 1], p = 1
    exact, M_p(−s) = 1 − M_{1−p}(s)) and rows nearly (see :func:`aha.softsort.marginal_residual`).
    `iterations=0` is SoftSort as published, clamped.

    Gradients flow through the sorted scores as well, as in the paper; |·| has a kink where scores tie.

    Args:
        scores: (B, n), higher = more important.
        fractions: (K,) non-decreasing in [0, 1].
        temperature: τ > 0, in units of the scores.
        noise: Gumbel(0, 1)·noise·τ is added to the scores.
        iterations: pairs of row and column normalisations, 10 when None.
        generator: source of the noise.

    Returns:
        Masks (B, K, n) in [0, 1].

    Raises:
        ValueError: see :func:`aha.softsort.prefix_masks`.
    """
    scores, fractions = prepare(scores, fractions, temperature=temperature, noise=noise, iterations=iterations)
    with full_precision(scores.device):
        scores = perturb(scores, scale=noise * temperature, generator=generator)
        ordered = scores.sort(dim=1, descending=True, stable=True).values
        logits = -(ordered[:, :, None] - scores[:, None, :]).abs() / temperature
        logits = logits - logits.logsumexp(dim=2, keepdim=True)
        for step in range(10 if iterations is None else iterations):
            if step > 0:
                logits = logits - logits.logsumexp(dim=2, keepdim=True)
            logits = logits - logits.logsumexp(dim=1, keepdim=True)
        masks = rank_weights(fractions, scores.shape[1], like=scores) @ logits.exp()
        return pin_endpoints(masks, fractions)
