"""Explainers where other libraries expect theirs: Captum's ``attribute(inputs, target)``, Quantus' explain function."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from aha.explainer import Explainer


class CaptumAttribution:
    """Captum's calling convention: ``attribute(inputs, target=…)`` gives something of the inputs' shape.

    ``captum.metrics`` take the method itself: ``infidelity(classifier, perturb, inputs, wrapped.attribute(inputs))``,
    ``sensitivity_max(wrapped.attribute, inputs, target=…)``; the classifier to pass them is
    :class:`~aha.classifier.FrozenClassifier`, which takes the same [0, 1] pixels.

    Args:
        explainer: any explainer.
    """

    def __init__(self, explainer: Explainer) -> None:
        self.explainer = explainer
        self.forward_func = explainer.classifier

    def attribute(self, inputs: Tensor | tuple[Tensor], target: Any = None, **_: Any) -> Tensor | tuple[Tensor]:
        """Maps repeated over the channels, shaped like ``inputs`` ``(batch, 3, H, W)``.

        Args:
            inputs: float in [0, 1]; perturbations beyond are clamped. A tuple of one comes back as a tuple of one.
            target: None (predicted), a class index, or one per image.
        """
        single = inputs[0] if isinstance(inputs, tuple) else inputs
        maps = self.explainer.attribute(single.detach().clamp(0, 1), target)
        maps = maps.expand(-1, single.shape[1], -1, -1).contiguous()
        return (maps,) if isinstance(inputs, tuple) else maps


def quantus_explain(explainer: Explainer, *, channels: int = 1) -> Any:
    """A function that Quantus takes as ``explain_func``, for its metrics' ``x_batch`` of [0, 1] pixels.

    Quantus' ``model`` should be the explainer's own classifier: it is the one that is explained, whatever is passed.

    Args:
        explainer: any explainer.
        channels: of the returned maps, 1 or 3.

    Returns:
        ``explain(model, inputs, targets, **kwargs) -> (batch, channels, H, W)`` float32 array.
    """

    def explain(model: Any, inputs: Any, targets: Any, **_: Any) -> np.ndarray:  # noqa: ARG001
        pixels = torch.as_tensor(np.asarray(inputs), dtype=torch.float32).clamp(0, 1)
        classes = None if targets is None else torch.as_tensor(np.asarray(targets)).long()
        maps = explainer.attribute(pixels, classes)
        return maps.expand(-1, channels, -1, -1).cpu().numpy().copy()

    return explain
