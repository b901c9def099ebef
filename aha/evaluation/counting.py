"""Counting how many images a classifier is shown, whatever path through it an explainer takes."""

from __future__ import annotations

import torch
from torch import nn

from aha.classifier import FrozenClassifier


class ForwardCounter:
    """Counts images that enter the classifier inside a ``with`` block; the hook is gone afterwards.

    A hook on the model itself would miss explainers that call its parts (``forward_features``), so it sits on the
    first layer that every pass runs once.

    Example:
        >>> classifier = FrozenClassifier.from_timm("test_vit", pretrained=False)
        >>> with ForwardCounter(classifier) as counter:
        ...     _ = classifier(torch.rand(3, 3, 160, 160))
        >>> counter.images
        3
    """

    def __init__(self, classifier: FrozenClassifier) -> None:
        self.images = 0
        self._layer = _first_layer(classifier)

    def __enter__(self) -> ForwardCounter:
        self._handle = self._layer.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _count(self, _module: nn.Module, inputs: tuple) -> None:
        self.images += len(inputs[0])


@torch.no_grad()
def _first_layer(classifier: FrozenClassifier) -> nn.Module:
    """The first parametrised layer that one pass runs exactly once."""
    calls: list[nn.Module] = []
    layers = [m for m in classifier.model.modules() if not any(m.children()) and any(True for _ in m.parameters())]
    handles = [m.register_forward_pre_hook(lambda module, _inputs: calls.append(module)) for m in layers]
    try:
        classifier(classifier.mean.expand(1, 3, *classifier.image_size))
    finally:
        for handle in handles:
            handle.remove()
    return next((layer for layer in calls if calls.count(layer) == 1), classifier.model)
