"""Segmentation agreement: a map thresholded at its mean against the object's mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from aha.metrics._maps import flat_maps, flat_masks, map_states


class SegmentationScores(NamedTuple):
    """Agreement per sample; NaN (and zero counts) for samples excluded.

    Attributes:
        pixel_accuracy: share of pixels on the right side, ``(batch,)``.
        image_mean_iou: mean over background and object of this image's IoU, ``(batch,)``. Over a data set the
            published figure pools intersections and unions instead: see :func:`pooled_mean_iou`.
        average_precision: ``(batch,)``.
        intersection: pixels agreed on, background and object, ``(batch, 2)`` int64.
        union: pixels in either, ``(batch, 2)`` int64.
    """

    pixel_accuracy: Tensor
    image_mean_iou: Tensor
    average_precision: Tensor
    intersection: Tensor
    union: Tensor


def segmentation_agreement(maps: Tensor, masks: Tensor) -> SegmentationScores:
    """Pixel accuracy, mean IoU and average precision, as in Chefer et al. 2021 (arXiv 2012.09838, released code).

    Foreground is A > mean(A). Average precision ranks the pixels of both classes together: scores are the map scaled
    to [0, 1] for the object and its complement for the background.

    Args:
        maps: ``(batch, 1, H, W)``. A constant map marks no foreground.
        masks: ``(batch, 1, H, W)``, non-zero = object. Samples with an empty object are excluded.

    Example:
        >>> maps = torch.tensor([[[[0.9, 0.8], [0.1, 0.6]]]])
        >>> scores = segmentation_agreement(maps, torch.tensor([[[[1, 1], [0, 0]]]]))
        >>> float(scores.pixel_accuracy), round(float(scores.image_mean_iou), 4)
        (0.75, 0.5833)
    """
    rows, inside = flat_maps(maps).double(), flat_masks(masks, maps)
    finite, _ = map_states(maps)
    use = finite & inside.any(1)
    rows = rows.masked_fill(~use[:, None], 0.0)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scaled = (rows - low) / (high - low).clamp(min=torch.finfo(torch.float64).tiny)
    marked = scaled > scaled.mean(1, keepdim=True)

    pairs = [(~marked, ~inside), (marked, inside)]
    intersection = torch.stack([(a & b).sum(1) for a, b in pairs], 1) * use[:, None]
    union = torch.stack([(a | b).sum(1) for a, b in pairs], 1) * use[:, None]
    accuracy = (marked == inside).double().mean(1)
    # A class absent from both map and mask agrees perfectly.
    iou = torch.where(union > 0, intersection / union.clamp(min=1), 1.0).double().mean(1)
    precision = average_precision(torch.cat([1 - scaled, scaled], 1), torch.cat([~inside, inside], 1))
    figures = (values.masked_fill(~use, torch.nan) for values in (accuracy, iou, precision))
    return SegmentationScores(*figures, intersection, union)


def average_precision(scores: Tensor, truth: Tensor) -> Tensor:
    """Σ (recall gained) · precision over the distinct scores from the highest down, of every row at once.

    What torchmetrics' ``binary_average_precision`` computes of one row.

    Args:
        scores: ``(batch, n)``.
        truth: ``(batch, n)`` bool; a row without any true entry gives NaN.

    Returns:
        ``(batch,)`` float64.
    """
    scores, order = scores.sort(dim=1, descending=True)
    hits = truth.gather(1, order).cumsum(1)
    ends = F.pad(scores[:, 1:] != scores[:, :-1], (0, 1), value=True)  # equal scores count together
    counted = torch.where(ends, hits, 0)
    gained = counted - F.pad(counted.cummax(1).values[:, :-1], (1, 0))
    ranks = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    return (torch.where(ends, gained, 0) * hits / ranks.double()).sum(1) / hits[:, -1]


def pooled_mean_iou(intersection: Tensor, union: Tensor) -> Tensor:
    """Mean over background and object of Σ intersection / Σ union, counts ``(samples, 2)``; float64 scalar."""
    return (intersection.sum(0).double() / union.sum(0)).mean()


class SegmentationAgreement(Metric):
    """Pixel accuracy and mean IoU pooled over the data set, and mean average precision; higher is better.

    See :func:`segmentation_agreement`. States ``excluded`` and ``constant`` count what its docstring says.

    Example:
        >>> metric = SegmentationAgreement()
        >>> metric.update(torch.tensor([[[[0.9, 0.8], [0.1, 0.6]]]]), torch.tensor([[[[1, 1], [0, 0]]]]))
        >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
        {'pixel_accuracy': 0.75, 'mean_iou': 0.5833, 'average_precision': 0.95}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    intersection: Tensor
    union: Tensor
    correct: Tensor
    pixels: Tensor
    precision: Tensor
    count: Tensor
    excluded: Tensor
    constant: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for state in ("intersection", "union"):
            self.add_state(state, torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        for state in ("correct", "pixels", "count", "excluded", "constant"):
            self.add_state(state, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("precision", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, maps: Tensor, masks: Tensor) -> None:
        """Add maps and masks, ``(batch, 1, H, W)`` both."""
        scores = segmentation_agreement(maps, masks)
        valid = ~scores.pixel_accuracy.isnan()
        count = int(valid.sum())
        intersection = scores.intersection.sum(0).to(self.intersection.device)
        self.intersection += intersection
        self.union += scores.union.sum(0).to(self.union.device)
        self.correct += intersection.sum()
        self.pixels += count * maps.shape[-2] * maps.shape[-1]
        self.precision += scores.average_precision[valid].sum().to(self.precision.device)
        self.count += count
        self.excluded += len(valid) - count
        self.constant += int(map_states(maps)[1].sum())

    def compute(self) -> dict[str, Tensor]:
        """``pixel_accuracy``, ``mean_iou`` and ``average_precision``, float64; NaN if all samples were excluded."""
        return {
            "pixel_accuracy": self.correct.double() / self.pixels,
            "mean_iou": (self.intersection.double() / self.union).mean(),
            "average_precision": self.precision / self.count,
        }

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the three values, or a series of them. Returns figure and axes."""
        return self._plot(val, ax)
