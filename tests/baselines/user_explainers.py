"""What a user might pass as ``module:name``: an explainer, functions, factories; one of them with bad manners."""

from __future__ import annotations

import torch

from aha.explainer import Explainer

GAIN = 2.0


class Mean(Explainer):
    name = "mean"

    def _attribute(self, images, targets):  # noqa: ANN001, ANN202
        return images.mean(1, keepdim=True)


def red(images, targets, gain=1.0):  # noqa: ANN001, ANN201
    return images[:, 0] * gain


def make(classifier, power=1):  # noqa: ANN001, ANN201
    return lambda images, targets: images[:, 1] ** power


class Meddling:
    """Hooks, flags and ``.grad`` left behind."""

    def __init__(self, classifier) -> None:  # noqa: ANN001
        self.classifier = classifier

    def __call__(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model = self.classifier.model
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.register_forward_hook(lambda *_: None)
        model.blocks[0].attn.fused_attn = False
        model.blocks[0].training = True
        images.requires_grad_(True)
        self.classifier(images).gather(1, targets[:, None]).sum().backward()
        return images.grad.sum(1)
