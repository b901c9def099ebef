"""What every explainer is: images and targets in, signed maps at image resolution out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier

Targets = int | Sequence[int] | Tensor | None


class Explainer:
    """Base of all explainers; subclasses implement :meth:`_attribute`.

    Attributes:
        name: how reports name it.
        classifier: the model that is explained. Explaining leaves no trace on it.
    """

    name = "explainer"

    def __init__(self, classifier: FrozenClassifier) -> None:
        self.classifier = classifier

    def attribute(self, images: Tensor, targets: Targets = None) -> Tensor:
        """Explain a batch.

        Args:
            images: RGB ``(batch, 3, H, W)``, float in [0, 1] or uint8.
            targets: None (each image's predicted class), one class index, or one per image.

        Returns:
            Attribution ``(batch, 1, H, W)``, float32, signed, higher = more important; detached.

        Raises:
            ValueError: images of another shape or type, or targets out of range.
        """
        images = as_images(images, self.device)
        if targets is not None:
            logits_like = images.new_empty(len(images), self.classifier.num_classes)
            targets = self.classifier.resolve_targets(targets, logits_like)
        maps = self._attribute(images, targets)
        expected = (len(images), 1, *images.shape[-2:])
        if tuple(maps.shape) != expected:
            msg = f"{self.name} returned maps of shape {tuple(maps.shape)}, expected {expected}."
            raise ValueError(msg)
        return maps.detach().float()

    @property
    def device(self) -> torch.device:
        """Where the explained classifier lives; images are moved there."""
        return self.classifier.mean.device

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        raise NotImplementedError


class CallableExplainer(Explainer):
    """Any function ``(images, targets) -> maps`` as an explainer; targets are always resolved class indices."""

    def __init__(self, classifier: FrozenClassifier, function: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
        super().__init__(classifier)
        self.function = function
        self.name = name

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        if targets is None:
            with torch.no_grad():
                targets = self.classifier(images).argmax(-1)
        maps = torch.as_tensor(self.function(images, targets), device=images.device)
        return maps if maps.ndim == 4 else maps[:, None]


def as_images(images: Tensor, device: torch.device | None = None) -> Tensor:
    """Check a batch of RGB images and bring it to float [0, 1] on a device, once.

    Args:
        images: ``(batch, 3, H, W)``, uint8 or float in [0, 1].
        device: where to move it; default: where it is.

    Raises:
        ValueError: for another shape or type, or for float values outside [0, 1] (already normalised images).
    """
    if images.ndim != 4 or images.shape[1] != 3:
        msg = f"images must be RGB (batch, 3, height, width), got {tuple(images.shape)}."
        raise ValueError(msg)
    if device is not None:
        images = images.to(device)
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        msg = f"images must be uint8 or floating point in [0, 1], got {images.dtype}."
        raise ValueError(msg)
    if images.numel():
        low, high = (float(v) for v in images.aminmax())
        if not (low >= -1e-3 and high <= 1 + 1e-3):
            msg = (
                f"images must lie in [0, 1], got values from {low:.3g} to {high:.3g}. "
                "Normalisation happens inside the classifier: pass plain pixels (or uint8)."
            )
            raise ValueError(msg)
    return images if images.dtype == torch.float64 else images.float()
