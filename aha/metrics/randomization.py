"""Model randomisation: an explanation that survives the loss of the model's weights explains something else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from aha.classifier import FrozenClassifier
from aha.explainer import Explainer, as_images
from aha.metrics._maps import map_states
from aha.metrics.similarity import rank_correlation, structural_similarity

Build = Callable[[FrozenClassifier], Explainer]


class RandomizationResult(NamedTuple):
    """Likeness of maps before and after randomisation, for each step of the cascade.

    Attributes:
        units: the last unit randomised at each step; all above it are random too.
        rank_correlation: ``(steps, batch)`` float64; NaN where a map is constant or not finite.
        ssim: ``(steps, batch)`` float64; NaN likewise.
        constant: ``(steps, batch)`` bool: the map of the randomised model ranks nothing.
    """

    units: list[str]
    rank_correlation: Tensor
    ssim: Tensor
    constant: Tensor


def model_randomization(
    build: Build,
    classifier: FrozenClassifier,
    images: Tensor,
    targets: int | Sequence[int] | Tensor | None = None,
    *,
    steps: int | None = None,
    seed: int = 0,
) -> RandomizationResult:
    """Cascading randomisation, top down (Adebayo et al. 2018, arXiv 1810.03292).

    Units (the classifier head, then blocks or stages, down to the stem) lose their weights one after another in a
    copy of the classifier; the explained model itself is never touched. Each parameter is drawn anew from a normal
    with its own mean and standard deviation, which keeps activations in range on any architecture (inferred: the
    source re-initialises). The same classes are explained throughout: ``targets``, or what the intact model predicts.

    Args:
        build: makes the explainer of a given classifier, for instance ``CDAM`` or
            ``lambda c: AmortizedExplainer(c, head)``.
        classifier: the explained model.
        images: ``(batch, 3, H, W)``, float in [0, 1] or uint8.
        targets: classes explained.
        steps: how many steps to report, spread over the units; default: every unit.
        seed: of the random weights, the same at every call.
    """
    images = as_images(images, classifier.mean.device)
    with torch.no_grad():
        logits = classifier(images)
    targets = classifier.resolve_targets(targets, logits)
    intact = build(classifier).attribute(images, targets)

    broken = copy.deepcopy(classifier)
    broken._fingerprint = None
    units, stops = _plan(broken, steps)
    names, correlations, similarities, constants = [], [], [], []
    done = 0
    for stop in stops:
        for index in range(done, stop):
            _randomize(units[index][1], seed + index)
        done = stop
        maps = build(broken).attribute(images, targets)
        names.append(units[stop - 1][0])
        correlations.append(rank_correlation(intact, maps))
        similarities.append(structural_similarity(intact, maps))
        constants.append(map_states(maps)[1])
    return RandomizationResult(names, torch.stack(correlations), torch.stack(similarities), torch.stack(constants))


def randomization_units(classifier: FrozenClassifier) -> list[tuple[str, list[nn.Parameter]]]:
    """Names and parameters of the classifier's parts, from the head down to the stem.

    Parts are the model's children in order, sequences opened into their members; parameters that belong to the model
    itself (class token, position embedding) come last.
    """
    root: nn.Module = classifier.model
    prefix = ""
    while True:
        children = [(name, child) for name, child in root.named_children() if any(True for _ in child.parameters())]
        if len(children) != 1 or list(root.parameters(recurse=False)):
            break
        prefix, root = f"{prefix}{children[0][0]}.", children[0][1]
    units = []
    for name, child in children:
        members = list(child.named_children()) if isinstance(child, nn.Sequential | nn.ModuleList) else []
        parts = [(f"{prefix}{name}.{inner}", part) for inner, part in members] or [(f"{prefix}{name}", child)]
        units += [(label, list(part.parameters())) for label, part in parts]
    units = [(label, parameters) for label, parameters in reversed(units) if parameters]
    own = list(root.parameters(recurse=False))
    return [*units, (f"{prefix}embeddings", own)] if own else units


def _plan(classifier: FrozenClassifier, steps: int | None) -> tuple[list[tuple[str, list[nn.Parameter]]], list[int]]:
    """The units, and after how many of them each reported step stands."""
    units = randomization_units(classifier)
    steps = len(units) if steps is None else min(steps, len(units))
    if steps < 1:
        msg = f"steps must be at least 1 (and {classifier.name} must have parameters), got {steps}."
        raise ValueError(msg)
    return units, sorted({round((k + 1) * len(units) / steps) for k in range(steps)})


def _randomize(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(parameter.mean() + parameter.std(correction=0) * noise)


class ModelRandomization(Metric):
    """Mean likeness of maps against cascade depth; lower is better. See :func:`model_randomization`.

    Args:
        build: makes the explainer of a given classifier (a function of a module, if the metric is to be pickled).
        classifier: the explained model; never changed.
        steps: how many steps to report.
        seed: of the random weights.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = -1.0
    plot_upper_bound = 1.0

    correlation: Tensor
    similarity: Tensor
    count: Tensor
    excluded: Tensor
    constant: Tensor

    def __init__(
        self, build: Build, classifier: FrozenClassifier, *, steps: int | None = None, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        # In a tuple, so that the frozen model isn't registered as a part of the metric.
        self._classifier = (classifier,)
        self._build = build
        self.steps, self.seed = steps, seed
        units, stops = _plan(classifier, steps)
        self.units = [units[stop - 1][0] for stop in stops]
        for state in ("correlation", "similarity"):
            self.add_state(state, torch.zeros(len(stops), dtype=torch.float64), dist_reduce_fx="sum")
        for state in ("count", "excluded", "constant"):
            self.add_state(state, torch.zeros(len(stops), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, images: Tensor, targets: int | Sequence[int] | Tensor | None = None) -> None:
        """Explain a batch ``(batch, 3, H, W)`` with the intact and with each randomised model."""
        result = model_randomization(
            self._build, self._classifier[0], images, targets, steps=self.steps, seed=self.seed
        )
        valid = ~result.rank_correlation.isnan()
        device = self.count.device
        self.correlation += result.rank_correlation.nansum(1).to(device)
        self.similarity += result.ssim.nansum(1).to(device)
        self.count += valid.sum(1).to(device)
        self.excluded += (~valid).sum(1).to(device)
        self.constant += result.constant.sum(1).to(device)

    def compute(self) -> dict[str, Tensor]:
        """``rank_correlation`` and ``ssim`` after each step, ``(steps,)`` float64."""
        return {"rank_correlation": self.correlation / self.count, "ssim": self.similarity / self.count}

    def plot(self, val: dict[str, Tensor] | None = None, ax: Any = None) -> Any:
        """Draw likeness against cascade depth. Returns figure and axes."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots() if ax is None else (ax.get_figure(), ax)
        depth = range(len(self.units) + 1)
        for name, values in (val or self.compute()).items():
            axes.plot(depth, [1.0, *values.tolist()], marker="o", label=f"{name.replace('_', ' ')} ↓")
        axes.set_xticks(depth, ["intact", *self.units], rotation=60, ha="right")
        axes.set_ylabel("likeness to the intact model's maps")
        axes.legend()
        return figure, axes
