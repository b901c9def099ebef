"""Deletion and insertion AUC, positive and negative perturbation: does the map rank what the classifier uses?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.metrics._base import SampleMean
from aha.metrics.protocol_run import ProtocolResult, run_protocol
from aha.metrics.protocols import Protocol, get_protocol

Targets = int | Sequence[int] | Tensor | None


class _CurveMetric(SampleMean):
    """Mean of one curve's figure over samples, with the mean curve as a state.

    Feed it images, maps and targets, or a :class:`~aha.metrics.protocol_run.ProtocolResult` when several metrics share
    one run: no image is then classified twice.

    Args:
        classifier: the explained model; not part of the metric's ``state_dict``.
        protocol: a name or settings; the number of points follows from the classifier's image size.
        chunk_size: images per classifier forward; None: chosen by device, free memory and size.
        overrides: settings of the protocol to replace.
    """

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    curve: Tensor
    _key: str
    _default: str

    def __init__(
        self,
        classifier: FrozenClassifier,
        *,
        protocol: str | Protocol | None = None,
        chunk_size: int | None = None,
        overrides: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.protocol = get_protocol(protocol or self._default, **(overrides or {}))
        if self._key not in self.protocol.metrics:
            msg = (
                f"{type(self).__name__} is not a metric of protocol {self.protocol.name!r}, which yields "
                f"{', '.join(self.protocol.metrics)}: choose another protocol, for instance {self._default!r}."
            )
            raise ValueError(msg)
        self.chunk_size = chunk_size
        # In a tuple, so that the frozen model isn't registered as a part of the metric.
        self._classifier = (classifier,)
        height, width = classifier.image_size
        self.fractions = self.protocol.points(height * width)[0]
        self.add_state("curve", torch.zeros(len(self.fractions), dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self,
        images: Tensor | ProtocolResult,
        maps: Tensor | None = None,
        targets: Targets = None,
        labels: Tensor | None = None,
    ) -> None:
        """Add a batch: images ``(batch, 3, H, W)``, maps ``(batch, 1, H, W)`` and targets, or a protocol's result."""
        if isinstance(images, ProtocolResult):
            result = images
        else:
            classifier = self._classifier[0]
            result = run_protocol(
                self.protocol, classifier, images, maps, targets, labels=labels, chunk_size=self.chunk_size
            )
        curves = result.curves[self._key]
        if curves.shape[1] != len(self.curve):
            msg = (
                f"Curves of {curves.shape[1]} points don't fit the {len(self.curve)} points that protocol "
                f"{self.protocol.name!r} has at the classifier's image size: use one metric per image size."
            )
            raise ValueError(msg)
        valid = self._add(result.metrics[self._key], result.constant)
        self.curve += curves[valid].double().sum(0).to(self.curve.device)

    def mean_curve(self) -> tuple[Tensor, Tensor]:
        """Shares of pixels and the mean score at each, ``(K,)`` both; over all processes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            return self.curve.new_tensor(self.fractions), self.curve / self.count

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the mean curve; with ``val``, one value or a series of them. Returns figure and axes."""
        if val is not None:
            return self._plot(val, ax)
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots() if ax is None else (ax.get_figure(), ax)
        fractions, curve = (values.cpu().numpy() for values in self.mean_curve())
        arrow = "↑" if self.higher_is_better else "↓"
        axes.plot(fractions, curve, label=f"{type(self).__name__} {arrow} {float(self.compute()):.3f}")
        axes.set_xlabel("share of pixels " + ("inserted" if self._key == "insertion" else "removed"))
        axes.set_ylabel(self.protocol.score)
        axes.set_title(f"protocol {self.protocol.name}")
        axes.legend()
        return figure, axes


class DeletionAUC(_CurveMetric):
    """Area under the score as the most important pixels are deleted first; lower is better (arXiv 1806.07421).

    Example:
        >>> classifier = FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=32, num_classes=4)
        >>> _ = torch.nn.init.zeros_(classifier.model.head.weight)  # a constant score of 1/4
        >>> metric = DeletionAUC(classifier, protocol="aha")
        >>> metric.update(torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32))
        >>> round(float(metric.compute()), 6)
        0.25
    """

    higher_is_better = False
    _key = "deletion"
    _default = "aha"


class InsertionAUC(_CurveMetric):
    """Area under the score as the most important pixels are inserted first; higher is better (arXiv 1806.07421)."""

    higher_is_better = True
    _key = "insertion"
    _default = "aha"


class PositivePerturbation(_CurveMetric):
    """Area under top-1 accuracy as the most important pixels go first; lower is better (arXiv 2012.09838)."""

    higher_is_better = False
    _key = "positive_perturbation"
    _default = "perturbation"


class NegativePerturbation(_CurveMetric):
    """Area under top-1 accuracy as the least important pixels go first; higher is better (arXiv 2012.09838)."""

    higher_is_better = True
    _key = "negative_perturbation"
    _default = "perturbation"


def deletion_auc(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Targets = None,
    *,
    protocol: str | Protocol = "aha",
    chunk_size: int | None = None,
) -> Tensor:
    """Deletion AUC per sample, ``(batch,)`` float64, NaN = excluded; lower is better. See :func:`run_protocol`."""
    return _one("deletion", classifier, images, maps, targets, protocol, chunk_size, None)


def insertion_auc(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Targets = None,
    *,
    protocol: str | Protocol = "aha",
    chunk_size: int | None = None,
) -> Tensor:
    """Insertion AUC per sample, ``(batch,)`` float64, NaN = excluded; higher is better. See :func:`run_protocol`."""
    return _one("insertion", classifier, images, maps, targets, protocol, chunk_size, None)


def positive_perturbation(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Targets = None,
    *,
    labels: Tensor | None = None,
    protocol: str | Protocol = "perturbation",
    chunk_size: int | None = None,
) -> Tensor:
    """Positive perturbation per sample, ``(batch,)`` float64, NaN = excluded; lower is better."""
    return _one("positive_perturbation", classifier, images, maps, targets, protocol, chunk_size, labels)


def negative_perturbation(
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Targets = None,
    *,
    labels: Tensor | None = None,
    protocol: str | Protocol = "perturbation",
    chunk_size: int | None = None,
) -> Tensor:
    """Negative perturbation per sample, ``(batch,)`` float64, NaN = excluded; higher is better."""
    return _one("negative_perturbation", classifier, images, maps, targets, protocol, chunk_size, labels)


def _one(
    key: str,
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: Targets,
    protocol: str | Protocol,
    chunk_size: int | None,
    labels: Tensor | None,
) -> Tensor:
    result = run_protocol(protocol, classifier, images, maps, targets, labels=labels, chunk_size=chunk_size)
    if key not in result.metrics:
        msg = f"Protocol {get_protocol(protocol).name!r} yields {', '.join(result.metrics)}, not {key}."
        raise ValueError(msg)
    return result.metrics[key]
