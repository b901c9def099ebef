"""The AHA objective: soft deletion, soft insertion and smoothness of an attribution map (arXiv 2604.05819)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.head import standardize
from aha.perturbation import (
    REFERENCES,
    Reference,
    auc,
    make_reference,
    pool_scores,
    sample_grid,
    sample_shift,
    soft_scores,
)
from aha.softsort import METHODS, prefix_masks

Method = Literal["quantile_sinkhorn", "gumbel_sinkhorn", "lapsum", "softsort"]


class Draw(NamedTuple):
    """What one step draws at random: shared by the whole batch and by all ranks.

    Attributes:
        grid: regions per side.
        shift: ``(dy, dx)`` of the grid in pixels.
        reference: kind of reference image.
        fractions: shares of the regions deleted, ``(K,)``, increasing.
    """

    grid: int
    shift: tuple[int, int]
    reference: Reference
    fractions: Tensor


class ObjectiveTerms(NamedTuple):
    """The loss and its parts.

    Attributes:
        loss: weighted sum, scalar, differentiable.
        deletion: soft deletion AUC per sample, ``(batch,)``; lower is better.
        insertion: soft insertion AUC per sample, ``(batch,)``; higher is better.
        smoothness: penalty on isolated peaks per sample, ``(batch,)``; lower is better.
        per_sample: the weighted sum per sample, ``(batch,)``, differentiable.
    """

    loss: Tensor
    deletion: Tensor
    insertion: Tensor
    smoothness: Tensor
    per_sample: Tensor


@dataclass(kw_only=True)
class AHAObjective:
    """How faithful a map is, differentiably: λ_del·deletion + λ_ins·(1 − insertion) + λ_s·smoothness.

    Both curves share one soft sort: the anchors are symmetric, so the insertion image at fraction p is
    x·M_p + r·(1 − M_p), with M the masks of the deletion path. Scores are standardised over the regions of each image,
    which makes the temperature mean the same for every map (inferred: the published code sorts raw scores).

    Args:
        method: the soft sort, see :func:`aha.softsort.prefix_masks`.
        noise: scale of the Gumbel noise in the sort.
        min_grid: smallest number of regions per side.
        max_grid: largest number of regions per side; one grid is drawn per step.
        max_shift: largest grid shift, as a share of a region's side; 0 switches it off.
        num_fractions: points on each curve.
        fraction_sampling: 'stratified' draws one fraction from each of as many equal strata (unbiased, no end points
            needed); 'linspace' is the published choice of fixed points with both ends and the trapezoid rule.
        references: kinds of reference image, one drawn per step.
        deletion_weight: λ_del.
        insertion_weight: λ_ins.
        smoothness_weight: λ_s.
        smoothness_window: side of the averaging window of the smoothness term, odd; cut to fit small images.
        blur_masks: soften region borders.
        standardize_scores: give the scores of each image zero mean and unit deviation; false is the published choice.
        chunk_size: perturbed images per classifier forward and backward; null: chosen by device, free memory and size.
    """

    method: Method = "quantile_sinkhorn"
    noise: float = 0.3
    min_grid: int = 7
    max_grid: int = 28
    max_shift: float = 0.5
    num_fractions: int = 6
    fraction_sampling: Literal["stratified", "linspace"] = "stratified"
    references: list[Reference] = field(default_factory=lambda: ["black", "mean", "blur"])
    deletion_weight: float = 1.0
    insertion_weight: float = 1.0
    smoothness_weight: float = 0.0025
    smoothness_window: int = 15
    blur_masks: bool = True
    standardize_scores: bool = True
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            msg = f"Unknown soft sort {self.method!r}: choose one of {', '.join(METHODS)}."
            raise ValueError(msg)
        if not 1 <= self.min_grid <= self.max_grid:
            msg = f"grids must satisfy 1 ≤ min_grid ≤ max_grid, got {self.min_grid} and {self.max_grid}."
            raise ValueError(msg)
        if self.num_fractions < 1 or (self.fraction_sampling == "linspace" and self.num_fractions < 2):
            msg = f"num_fractions must be at least 1 (2 for 'linspace'), got {self.num_fractions}."
            raise ValueError(msg)
        if self.smoothness_window < 1 or self.smoothness_window % 2 == 0:
            msg = f"smoothness_window must be odd, got {self.smoothness_window}."
            raise ValueError(msg)
        unknown = set(self.references) - set(REFERENCES)
        if unknown or not self.references:
            msg = f"Unknown references {sorted(unknown)}: choose among {', '.join(REFERENCES)}."
            raise ValueError(msg)

    def draw(self, size: tuple[int, int], generator: torch.Generator) -> Draw:
        """Draw grid, shift, reference and fractions for one step; ``size`` is ``(H, W)``, the generator on the CPU."""
        grid = sample_grid(self.min_grid, self.max_grid, generator=generator)
        shift = sample_shift(grid, size, self.max_shift, generator=generator)
        reference = self.references[int(torch.randint(len(self.references), (), generator=generator))]
        if self.fraction_sampling == "linspace":
            fractions = torch.linspace(0, 1, self.num_fractions)
        else:
            strata = torch.arange(self.num_fractions)
            fractions = (strata + torch.rand(self.num_fractions, generator=generator)) / self.num_fractions
        return Draw(grid, shift, reference, fractions)

    def __call__(
        self,
        classifier: FrozenClassifier,
        images: Tensor,
        maps: Tensor,
        targets: Tensor,
        draw: Draw,
        *,
        temperature: float,
        clean_logits: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> ObjectiveTerms:
        """Score maps on one draw.

        Args:
            classifier: the explained model.
            images: ``(batch, 3, H, W)`` in [0, 1].
            maps: ``(batch, 1, H, W)``, differentiable.
            targets: ``(batch,)``, or ``(batch, T)`` to score T classes on the same map.
            draw: from :meth:`draw`.
            temperature: τ of the soft sort.
            clean_logits: logits of the images, for end points at p = 0; computed where missing.
            generator: source of the sort's noise, on the maps' device.
        """
        with torch.autocast(images.device.type, enabled=False):
            maps = maps.float()
            scores = pool_scores(maps, draw.grid, shift=draw.shift)
            scores = standardize(scores) if self.standardize_scores else scores
            fractions = draw.fractions.to(maps.device)
            interior = (fractions > 0) & (fractions < 1)
            masks = prefix_masks(
                scores,
                fractions[interior],
                method=self.method,
                temperature=temperature,
                noise=self.noise,
                generator=generator,
            )
        reference = make_reference(images, draw.reference, data_mean=classifier.mean)
        scored = soft_scores(
            classifier,
            images,
            reference,
            torch.cat([masks, 1 - masks], 1),
            targets,
            grid=draw.grid,
            shift=draw.shift,
            blur=self.blur_masks,
            chunk_size=self.chunk_size,
        )
        deletion, insertion = scored.chunk(2, dim=1)
        if self.fraction_sampling == "linspace":
            first, last = self._ends(classifier, images, reference, targets, clean_logits)
            deletion = auc(torch.cat([first, deletion, last], 1), fractions)
            insertion = auc(torch.cat([last, insertion, first], 1), fractions)
        else:
            deletion, insertion = deletion.mean(1), insertion.mean(1)
        smoothness = self.smoothness(maps)
        per_sample = (
            self.deletion_weight * deletion
            + self.insertion_weight * (1 - insertion)
            + self.smoothness_weight * smoothness
        )
        return ObjectiveTerms(per_sample.mean(), deletion.detach(), insertion.detach(), smoothness.detach(), per_sample)

    def smoothness(self, maps: Tensor) -> Tensor:
        """mean(relu(A − local mean of A)²) of the standardised map, ``(batch,)``: it punishes isolated peaks."""
        maps = standardize(maps) if self.standardize_scores else maps
        reach = min(self.smoothness_window // 2, min(maps.shape[-2:]) - 1)
        local = F.avg_pool2d(F.pad(maps, (reach,) * 4, mode="reflect"), 2 * reach + 1, stride=1)
        return (maps - local).relu().square().mean((1, 2, 3))

    @torch.no_grad()
    def _ends(
        self, classifier: FrozenClassifier, images: Tensor, reference: Tensor, targets: Tensor, clean: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores of the clean images and of the reference, ``(batch, 1)`` each."""
        targets = targets.view(len(images), -1)
        clean = classifier(images) if clean is None else clean
        # A constant reference is an expanded view: one image stands for the batch.
        logits = classifier(reference[:1] if reference.stride(0) == 0 else reference).expand(len(images), -1)
        first, last = (classifier.probabilities(x).gather(1, targets).mean(1, keepdim=True) for x in (clean, logits))
        return first, last
