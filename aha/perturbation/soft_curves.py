"""Soft perturbation scores with the memory of one chunk and the exact gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aha.classifier import FrozenClassifier
from aha.perturbation.chunks import automatic_chunk_size, lay_out
from aha.perturbation.regions import region_masks_to_pixels


def soft_scores(
    classifier: FrozenClassifier,
    images: Tensor,
    reference: Tensor,
    masks: Tensor,
    targets: Tensor,
    *,
    grid: int,
    shift: tuple[int, int] = (0, 0),
    blur: bool = True,
    chunk_size: int | None = None,
) -> Tensor:
    """Probability of the targets in images x·(1 − M) + r·M (arXiv 2604.05819, released code).

    A deletion path passes M, an insertion path 1 − M. Every score depends on its own mask alone, so the forward pass
    stores ∂score/∂mask chunk by chunk and the backward pass is one product: the gradient of the unchunked
    computation, with the activations of one chunk and no recomputation.

    Args:
        classifier: the explained model.
        images: x, ``(batch, 3, H, W)`` in [0, 1].
        reference: r, same shape.
        masks: M, ``(batch, K, n)`` in [0, 1], n = grid²; differentiable.
        targets: ``(batch,)``, or ``(batch, T)`` for the mean over T classes read from the same logits.
        grid: regions per side.
        shift: the grid's shift in pixels.
        blur: soften region borders.
        chunk_size: images per classifier forward; None: :func:`~aha.perturbation.chunks.automatic_chunk_size`.

    Returns:
        ``(batch, K)``, float32 (float64 of a float64 classifier).
    """
    batch, count, regions = masks.shape
    samples = torch.arange(batch, device=masks.device).repeat_interleave(count)
    targets = targets.reshape(batch, -1)
    size = (images.shape[-2], images.shape[-1])
    chunk_size = automatic_chunk_size(classifier, images) if chunk_size is None else chunk_size
    images, difference = lay_out(images), lay_out(reference - images)

    def score(flat: Tensor, start: int) -> Tensor:
        of = samples[start : start + len(flat)]
        mask = region_masks_to_pixels(flat[:, None], grid, size, shift=shift, blur=blur)
        # One addition per pixel and no third image in memory: x + (r − x)·M.
        perturbed = torch.addcmul(images[of], difference[of], mask)
        return classifier.probabilities(classifier(perturbed)).gather(1, targets[of]).mean(1)

    flat = masks.reshape(-1, regions)
    flat = flat if torch.is_grad_enabled() else flat.detach()
    return _ChunkedScores.apply(flat, score, chunk_size).view(batch, count)


class _ChunkedScores(torch.autograd.Function):
    """Row-wise scores of masks: row i of the output depends on row i of the input alone."""

    @staticmethod
    def forward(ctx, masks: Tensor, score: Callable[[Tensor, int], Tensor], chunk_size: int) -> Tensor:  # noqa: ANN001
        need = ctx.needs_input_grad[0]
        scores, jacobian = [], []
        for start in range(0, len(masks), chunk_size):
            chunk = masks[start : start + chunk_size].detach().requires_grad_(need)
            with torch.set_grad_enabled(need):
                value = score(chunk, start)
                if need:
                    jacobian.append(torch.autograd.grad(value.sum(), chunk)[0])
            scores.append(value.detach())
        if need:
            ctx.save_for_backward(torch.cat(jacobian))
        return torch.cat(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001
        (jacobian,) = ctx.saved_tensors
        return grad[:, None] * jacobian, None, None
