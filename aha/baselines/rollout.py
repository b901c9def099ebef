"""Attention rollout: averaged heads and the skip connection, multiplied through the blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from aha.baselines.capture import capture_attention
from aha.baselines.geometry import Upsample, check_upsample, full_precision, resize
from aha.baselines.propagation import layout_of, propagate, regrid
from aha.baselines.traceless import differentiable
from aha.classifier import FrozenClassifier
from aha.explainer import Explainer


class AttentionRollout(Explainer):
    """Attention rollout (Abnar & Zuidema, arXiv 2005.00928): one forward pass, the same map for every class.

    Read out at the prefix tokens of models that classify a CLS token, otherwise averaged over the patches.

    Args:
        classifier: a model with readable attention, as for GradSkip.
        upsample: ``"nearest"`` or ``"bilinear"``.
    """

    name = "rollout"

    def __init__(self, classifier: FrozenClassifier, *, upsample: Upsample = "nearest") -> None:
        super().__init__(classifier)
        self.upsample = check_upsample(upsample)

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:  # noqa: ARG002
        size = (images.shape[-2], images.shape[-1])
        with differentiable(self.classifier, images) as (classifier, images), torch.no_grad():
            with capture_attention(classifier, "Attention rollout") as records:
                classifier.forward(images)
            behind = relevance = None
            for record in reversed(records):
                layout = layout_of(classifier, "Attention rollout", record, len(images), size)
                weights = full_precision(record.attention).mean(1)
                ones = weights.new_ones(len(images), layout.tokens)
                relevance = _start(classifier, ones) if behind is None else regrid(relevance, behind, layout)
                relevance = propagate(relevance, weights, ones[:, :1] / 2, layout, ones)
                behind = layout
            patches = relevance[:, classifier.num_prefix_tokens :].unflatten(1, behind.grid)
            return resize(patches[:, None], size, self.upsample)


def _start(classifier: FrozenClassifier, ones: Tensor) -> Tensor:
    prefix = classifier.num_prefix_tokens
    start = torch.zeros_like(ones)
    if prefix and getattr(classifier.model, "global_pool", "token") == "token":
        # A distilled model classifies two tokens; register tokens behind the CLS token are not classified.
        classified = 2 if hasattr(classifier.model, "head_dist") else 1
        start[:, :classified] = 1
    else:
        start[:, prefix:] = 1
    return start / start.sum(1, keepdim=True)
