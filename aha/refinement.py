"""Test-time refinement: a few gradient steps on one sample's own objective sharpen its map (arXiv 2604.05819)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer, Explainer, Targets, some_images
from aha.head import standardize
from aha.objective import AHAObjective, Draw
from aha.perturbation import Reference


class Refined(NamedTuple):
    """What refinement returns.

    Attributes:
        maps: ``(batch, 1, H, W)``; a sample that did not gain comes back exactly as it was.
        before: objective of the given maps, ``(batch,)``; lower is better.
        after: objective of the returned maps, ``(batch,)``; never above ``before``.
        step: which step was best, ``(batch,)``; 0 = unrefined.
        failed: samples whose objective or gradient turned non-finite, ``(batch,)`` bool; they come back unrefined.
        forwards: perturbed images sent through the classifier, per sample.
        backwards: how many of those were also propagated back, per sample.
    """

    maps: Tensor
    before: Tensor
    after: Tensor
    step: Tensor
    failed: Tensor
    forwards: int
    backwards: int


@dataclass(kw_only=True)
class RefineOptions:
    """How maps are refined: everything is fixed, nothing random.

    The paper states T = 3 steps; the released code has no refinement, so the two modes, the optimiser and all sizes
    are inferred, and chosen by the study in the README.

    Args:
        steps: gradient steps T.
        mode: 'map' moves the map itself, 'head' a per-sample copy of the head.
        step_size: Adam's; of the standardised map in 'map' mode, of the head's weights in 'head' mode; default 0.3
            and 0.003.
        grids: regions per side.
        num_fractions: points on each curve, at the middle of equal strata.
        temperature: of the soft sort; small, so that soft masks are near the hard ones.
        references: kinds of reference image; the objective is the mean over grids and references. With the mean colour
            alone maps gain most on that, and lose where pixels turn black.
        smoothness_weight: weight of the penalty on isolated peaks.
        chunk_size: perturbed images per classifier forward and backward; null: chosen by device, free memory and size.
    """

    steps: int = 3
    mode: Literal["map", "head"] = "map"
    step_size: float | None = None
    grids: list[int] = field(default_factory=lambda: [8, 16])
    num_fractions: int = 5
    temperature: float = 0.15
    references: list[Reference] = field(default_factory=lambda: ["mean", "black"])
    smoothness_weight: float = 0.0025
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 0 or not self.grids or not self.references or self.mode not in ("map", "head"):
            msg = f"steps ≥ 0, at least one grid and reference, and mode 'map' or 'head' are needed, got {self}."
            raise ValueError(msg)


def refine(
    explainer: Explainer,
    images: Tensor,
    targets: Targets = None,
    *,
    maps: Tensor | None = None,
    options: RefineOptions | None = None,
) -> Refined:
    """Refine the maps of a batch, each sample as it would be alone; neither classifier nor head is changed.

    Args:
        explainer: any explainer in 'map' mode, an :class:`~aha.explainer.AmortizedExplainer` in 'head' mode.
        images: ``(batch, 3, H, W)``, float in [0, 1] or uint8.
        targets: as in :meth:`Explainer.attribute <aha.explainer.Explainer.attribute>`.
        maps: the explainer's maps, where already at hand.
        options: see :class:`RefineOptions`.

    Raises:
        ValueError: 'head' mode with an explainer that has no head.
    """
    options = options or RefineOptions()
    classifier = explainer.classifier
    with torch.inference_mode(False):
        # A trainer's inference tensors can't be saved for a backward pass; copies made here can.
        images = some_images(images.detach().clone(), explainer.device)
        with torch.no_grad():
            targets = classifier.resolve_targets(targets, classifier(images)).clone()
        start = explainer.attribute(images, targets) if maps is None else maps.to(images.device).float().clone()
        if tuple(start.shape) != (len(images), 1, *images.shape[-2:]):
            msg = f"maps must be {(len(images), 1, *images.shape[-2:])} for these images, got {tuple(start.shape)}."
            raise ValueError(msg)
        return _refine(explainer, images, start, targets, options)


def _refine(explainer: Explainer, images: Tensor, start: Tensor, targets: Tensor, options: RefineOptions) -> Refined:
    classifier = explainer.classifier
    if options.mode == "map":
        best, before, after, step, failed = _refine_maps(classifier, images, start, targets, options)
    elif isinstance(explainer, AmortizedExplainer):
        parts = [
            _refine_head(explainer, *(x[i : i + 1] for x in (images, start, targets)), options)
            for i in range(len(images))
        ]
        best, before, after, step, failed = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        msg = f"mode='head' needs an amortized explainer, and {explainer.name} has no head: use mode='map'."
        raise ValueError(msg)
    per_step = 2 * options.num_fractions * len(options.grids) * len(options.references)
    return Refined(best, before, after, step, failed, per_step * (options.steps + 1), per_step * options.steps)


def self_check(
    classifier: FrozenClassifier, images: Tensor, maps: Tensor, targets: Tensor, options: RefineOptions
) -> Tensor:
    """The soft objective of maps, per sample ``(batch,)``; lower is better. It needs no labels."""
    with torch.no_grad():
        return _objective(classifier, images, maps, targets, options)


def _objective(
    classifier: FrozenClassifier, images: Tensor, maps: Tensor, targets: Tensor, options: RefineOptions
) -> Tensor:
    objective = AHAObjective(noise=0.0, smoothness_weight=options.smoothness_weight, chunk_size=options.chunk_size)
    fractions = (torch.arange(options.num_fractions) + 0.5) / options.num_fractions
    values = [
        objective(
            classifier,
            images,
            maps,
            targets,
            Draw(grid, (0, 0), reference, fractions),
            temperature=options.temperature,
        ).per_sample
        for grid in options.grids
        for reference in options.references
    ]
    return torch.stack(values).mean(0)


class _Best:
    """The best step so far, per sample."""

    def __init__(self, maps: Tensor) -> None:
        count = len(maps)
        self.maps = maps.clone()
        self.value = maps.new_full((count,), torch.inf)
        self.step = torch.zeros(count, dtype=torch.long, device=maps.device)
        self.failed = torch.zeros(count, dtype=torch.bool, device=maps.device)
        self.before: Tensor | None = None

    def update(self, step: int, maps: Tensor, value: Tensor) -> None:
        self.failed |= ~value.isfinite()
        self.before = value if self.before is None else self.before
        better = (value < self.value) & ~self.failed
        self.value = torch.where(better, value, self.value)
        self.step = torch.where(better, step, self.step)
        self.maps[better] = maps[better]

    def result(self, start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        kept = self.failed | (self.step == 0)
        maps = torch.where(kept.view(-1, 1, 1, 1), start, self.maps)
        step = torch.where(self.failed, 0, self.step)
        return maps, self.before, torch.where(kept, self.before, self.value), step, self.failed


def _refine_maps(
    classifier: FrozenClassifier, images: Tensor, start: Tensor, targets: Tensor, options: RefineOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    maps = standardize(start).clone().requires_grad_()
    # Adam works element by element, so the samples of a batch don't touch each other.
    optimizer = torch.optim.Adam([maps], lr=0.3 if options.step_size is None else options.step_size)
    best = _Best(maps.detach())
    for step in range(options.steps + 1):
        last = step == options.steps
        with torch.set_grad_enabled(not last):
            value = _objective(classifier, images, maps, targets, options)
        best.update(step, maps.detach(), value.detach())
        if not last:
            (maps.grad,) = torch.autograd.grad(value.sum(), maps)
            best.failed |= ~maps.grad.flatten(1).isfinite().all(1)
            maps.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
    return best.result(start)


def _refine_head(
    explainer: AmortizedExplainer, images: Tensor, start: Tensor, targets: Tensor, options: RefineOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    output = explainer.encode(images)
    head = copy.deepcopy(explainer.head).eval()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.003 if options.step_size is None else options.step_size)
    best = _Best(start)
    for step in range(options.steps + 1):
        last = step == options.steps
        with torch.set_grad_enabled(not last):
            maps = explainer.decode(output, images, targets, head=head)
            value = _objective(explainer.classifier, images, maps, targets, options)
        best.update(step, maps.detach(), value.detach())
        if not last:
            optimizer.zero_grad()
            value.sum().backward()
            if not all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None):
                best.failed |= True
                break
            optimizer.step()
    return best.result(start)
