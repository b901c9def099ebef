"""Faithfulness violation: does the strongest region push the way its sign says?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.explainer import as_images
from aha.metrics._base import SampleMean
from aha.metrics._maps import map_states
from aha.perturbation import Reference, make_reference, pool_scores, region_masks_to_pixels


@torch.no_grad()
def faithfulness_violation(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: int | Sequence[int] | Tensor | None = None,
    *,
    grid: int = 14,
    reference: Reference = "mean",
    chunk_size: int = 64,
    clean_logits: Tensor | None = None,
) -> Tensor:
    """Faithfulness violation test (Liu et al. 2022, arXiv 2201.12114).

    With w the map pooled over a grid and i* = argmax |wᵢ|, a sample is violated if
    sign(w_i*) · (p(x) − p(x without i*)) < 0. The source removes tokens; that a region of a grid stands for one in an
    image, and which reference replaces it, are inferred: no source states them for pixel maps.

    Args:
        classifier: the explained model.
        images: ``(batch, 3, H, W)``, float in [0, 1] or uint8.
        maps: ``(batch, 1, H, W)``, signed.
        targets: classes explained; default: the predicted ones.
        grid: regions per side.
        reference: replaces the region.
        chunk_size: images per classifier forward.
        clean_logits: logits of the clean images, where already at hand.

    Returns:
        ``(batch,)`` float64: 1 violated, 0 not; NaN excluded (a map that is zero everywhere, or not finite).
    """
    images = as_images(images, classifier.mean.device)
    if tuple(maps.shape) != (len(images), 1, *images.shape[-2:]):
        msg = f"maps must be {(len(images), 1, *images.shape[-2:])} for these images, got {tuple(maps.shape)}."
        raise ValueError(msg)
    maps = maps.to(images.device)
    finite, _ = map_states(maps)
    if clean_logits is None:
        clean_logits = torch.cat([classifier(chunk) for chunk in images.split(chunk_size)])
    targets = classifier.resolve_targets(targets, clean_logits)
    scores = pool_scores(maps.float().nan_to_num(), grid)
    strongest = scores.abs().argmax(1)
    sign = scores.gather(1, strongest[:, None]).squeeze(1).sign()
    use = finite & (sign != 0)
    values = torch.full((len(images),), torch.nan, dtype=torch.float64, device=images.device)
    if not use.any():
        return values

    region = F.one_hot(strongest[use], grid * grid).float()[:, None]
    hidden = region_masks_to_pixels(region, grid, tuple(images.shape[-2:]), blur=False) > 0.5
    shown = images[use]
    perturbed = torch.where(hidden, make_reference(shown, reference, data_mean=classifier.mean), shown)
    without = torch.cat([classifier(chunk) for chunk in perturbed.split(chunk_size)])
    drop = classifier.target_probability(clean_logits[use], targets[use]) - classifier.target_probability(
        without, targets[use]
    )
    values[use] = (sign[use] * drop < 0).double()
    return values


class FaithfulnessViolation(SampleMean):
    """Share of samples whose strongest region pushes against its sign; lower is better.

    See :func:`faithfulness_violation` for the options. Constant maps (their first region is taken) are counted.
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(
        self,
        classifier: FrozenClassifier,
        *,
        grid: int = 14,
        reference: Reference = "mean",
        chunk_size: int = 64,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # In a tuple, so that the frozen model isn't registered as a part of the metric.
        self._classifier = (classifier,)
        self.options = {"grid": grid, "reference": reference, "chunk_size": chunk_size}

    def update(self, images: Tensor, maps: Tensor, targets: int | Sequence[int] | Tensor | None = None) -> None:
        """Add images ``(batch, 3, H, W)``, maps ``(batch, 1, H, W)`` and the classes explained."""
        values = faithfulness_violation(self._classifier[0], images, maps, targets, **self.options)
        self._add(values, map_states(maps)[1])
