"""Small explainers whose maps depend on the head: its last layer is far from zero."""

from __future__ import annotations

import torch

from aha import AmortizedExplainer, FrozenClassifier


def trained_like(classifier: FrozenClassifier, *, width: int = 8, **options) -> AmortizedExplainer:
    explainer = AmortizedExplainer(classifier, width=width, **options)
    with torch.no_grad():
        explainer.head.output.weight.normal_(std=1.0)
        explainer.head.output.bias.fill_(0.3)
    return explainer
