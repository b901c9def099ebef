"""One training step as published (arXiv 2604.05819), written from the paper's formulas and nothing of ``aha``'s.

Two n × n Gumbel-Sinkhorn sorts of 30 unrolled iterations, both curves with their end points, a classifier forward for
each target class (64 images a sample at 16 fractions and 2 classes), gradient checkpointing in the classifier, frozen
weights. The benchmarks time :class:`aha.objective.AHAObjective` against it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kornia.filters import gaussian_blur2d
from torch import Tensor

Classify = Callable[[Tensor], Tensor]


def reference_loss(
    classify: Classify,
    images: Tensor,
    maps: Tensor,
    targets: Tensor,
    reference: Tensor,
    *,
    grid: int,
    temperature: float,
    noise: float = 1.0,
    fractions: int = 16,
    iterations: int = 30,
    smoothness_weight: float = 0.0025,
) -> Tensor:
    """Deletion + (1 − insertion) + weighted smoothness, mean over the batch.

    Args:
        classify: images in [0, 1] to logits; checkpoints its activations.
        images: ``(batch, 3, H, W)``.
        maps: ``(batch, 1, H, W)``, sorted as they are.
        targets: ``(batch, classes)``; each class has forwards of its own.
        reference: ``(batch, 3, H, W)``.
        grid: regions per side.
        temperature: of the sort.
        noise: scale of the Gumbel noise.
        fractions: points of each curve, both ends included.
        iterations: of Sinkhorn.
        smoothness_weight: λ_s.
    """
    scores = F.adaptive_avg_pool2d(maps, grid).flatten(1)
    shares = torch.linspace(0, 1, fractions, device=images.device)
    areas = []
    for signed in (scores, -scores):  # most important first, and least important first
        permutation = gumbel_sinkhorn(signed, temperature=temperature, noise=noise, iterations=iterations)
        masks = to_pixels(cumulative_masks(permutation, shares), grid, images.shape[-2:])
        perturbed = (1 - masks) * images[:, None] + masks * reference[:, None]
        for column in targets.T:
            probabilities = classify(perturbed.flatten(0, 1)).softmax(-1).view(len(images), fractions, -1)
            chosen = column.view(-1, 1, 1).expand(-1, fractions, 1)
            areas.append(torch.trapezoid(probabilities.gather(2, chosen).squeeze(2), shares))
    deletion, insertion = torch.stack(areas).view(2, -1, len(images)).mean(1)
    local = F.avg_pool2d(F.pad(maps, (7, 7, 7, 7), mode="reflect"), 15, stride=1)
    smoothness = (maps - local).relu().square().mean((1, 2, 3))
    return (deletion + (1 - insertion) + smoothness_weight * smoothness).mean()


def gumbel_sinkhorn(scores: Tensor, *, temperature: float, noise: float, iterations: int) -> Tensor:
    """Soft permutation ``(batch, rank, region)`` of scores ``(batch, n)``."""
    batch, n = scores.shape
    logits = -((scores[:, None, :] - torch.linspace(1, 0, n, device=scores.device)[:, None]) ** 2)
    if noise > 0:
        logits = logits - noise * torch.empty_like(logits).exponential_().log()
    logits = logits / temperature
    for _ in range(iterations):
        logits = logits - torch.logsumexp(logits, 1, keepdim=True)
        logits = logits - torch.logsumexp(logits, 2, keepdim=True)
    return logits.exp()


def cumulative_masks(permutation: Tensor, shares: Tensor) -> Tensor:
    """Sum of the first p·n rows, linear between whole rows: ``(batch, K, n)``."""
    n = permutation.shape[1]
    sums = F.pad(permutation.cumsum(1), (0, 0, 1, 0))
    position = shares * n
    low = position.floor().long().clamp(max=n - 1)
    part = (position - low)[:, None]
    return (1 - part) * sums[:, low] + part * sums[:, low + 1]


def to_pixels(masks: Tensor, grid: int, size: tuple[int, int]) -> Tensor:
    """``(batch, K, n)`` to ``(batch, K, 1, H, W)``: nearest, blurred, clamped."""
    pixels = F.interpolate(masks.unflatten(2, (grid, grid)), size=tuple(size), mode="nearest")
    return gaussian_blur2d(pixels, (7, 7), (1.0, 1.0), border_type="reflect").clamp(0, 1)[:, :, None]
