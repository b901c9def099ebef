"""A segmentation model as a classifier: a class's score is the sum of its logits over a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn


class MaskedLogits(nn.Module):
    """Sum a segmentation model's logits over a mask, so that every explainer serves it (GradSkip, arXiv 2607.10365).

    Args:
        model: maps normalised images ``(batch, 3, H, W)`` to logits ``(batch, classes, h, w)``.

    Example:
        >>> scores = MaskedLogits(nn.Conv2d(3, 5, 1))
        >>> with scores.over(torch.ones(2, 1, 8, 8, dtype=torch.bool)):
        ...     scores(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._mask: Tensor | None = None

    @contextmanager
    def over(self, mask: Tensor) -> Iterator[None]:
        """Sum over ``mask`` ``(batch, 1, H, W)`` inside; elsewhere over the whole picture."""
        before, self._mask = self._mask, mask
        try:
            yield
        finally:
            self._mask = before

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, classes)``."""
        logits = self.model(images)
        if self._mask is None:
            return logits.sum((-2, -1))
        mask = F.interpolate(self._mask.to(logits), size=logits.shape[-2:], mode="nearest")
        return (logits * mask).sum((-2, -1))
