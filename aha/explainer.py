"""What every explainer is: images and targets in, signed maps at image resolution out; and the amortized one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from aha.backbone import FrozenBackbone
from aha.classifier import ClassifierOutput, FrozenClassifier
from aha.head import AttributionHead, FeatureNorm, Upsampling, resize

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
            Attribution ``(batch, 1, H, W)``, float32, signed, higher = more important; detached. NaN is passed on as
            it is: ranking puts it last, metrics count it.

        Raises:
            ValueError: no images, images of another shape or type, or targets out of range.
        """
        images = some_images(images, self.device).detach()
        if targets is not None:
            logits_like = images.new_empty(len(images), self.classifier.num_classes)
            targets = self.classifier.resolve_targets(targets, logits_like)
        with torch.inference_mode(False):
            # A trainer's inference tensors can't enter a gradient method; copies made here can.
            images, targets = (x.clone() if x is not None and x.is_inference() else x for x in (images, targets))
            with named_size(self.classifier, images):
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


class Explanation(NamedTuple):
    """Maps with the prediction they came from.

    Attributes:
        maps: attribution, ``(batch, 1, H, W)``, float32, signed.
        logits: ``(batch, classes)``.
        targets: classes explained, ``(batch,)``.
    """

    maps: Tensor
    logits: Tensor
    targets: Tensor


class AmortizedExplainer(Explainer):
    """A frozen classifier and a trained head: the map costs one forward pass, and the logits come with it.

    Args:
        classifier: the explained model.
        encoder: the frozen backbone whose features the head reads; None: the explained model's own, which come free
            with the prediction. Another one (the paper's choice, a DINOv3) costs a pass of its own.
        width: channels of the head.
        class_vector: ``"weights"`` conditions the head on the classifier's own weight row of the class,
            ``"embedding"`` on a learned one, ``"none"`` on nothing: the evidence map alone then tells classes apart,
            and the head can't learn few pictures' classes by heart.
        evidence: add the classifier's own evidence map (class vector times final features) to the head's output.
        upsampling: ``"nearest"`` keeps the edges of the tokens, ``"bilinear"`` is smoother.
        feature_norm: ``"position"`` normalises each position of the features by itself, ``"image"`` all together, which
            keeps where a feature map is strong.
        edges: let values spread inside objects and stop at the edges of the image (guided filter).

    Attributes:
        options: those of the head, as passed.
        record: ``"training"`` summary and ``"metrics"`` of the artefact it was loaded from, else empty.

    Example:
        >>> explainer = AmortizedExplainer(FrozenClassifier.from_timm("test_vit", pretrained=False))
        >>> explainer.attribute(torch.rand(2, 3, 160, 160)).shape
        torch.Size([2, 1, 160, 160])
    """

    name = "aha"

    def __init__(
        self,
        classifier: FrozenClassifier,
        *,
        encoder: FrozenBackbone | None = None,
        width: int = 96,
        class_vector: Literal["weights", "embedding", "none"] = "weights",
        evidence: bool = True,
        upsampling: Upsampling = "nearest",
        feature_norm: FeatureNorm = "position",
        edges: bool = False,
    ) -> None:
        super().__init__(classifier)
        if class_vector not in ("weights", "embedding", "none"):
            msg = f"class_vector must be 'weights', 'embedding' or 'none', got {class_vector!r}."
            raise ValueError(msg)
        if class_vector == "none" and not evidence:
            msg = "class_vector='none' needs evidence=True: nothing else would tell one class's map from another's."
            raise ValueError(msg)
        self.options: dict[str, Any] = {
            "width": width,
            "class_vector": class_vector,
            "evidence": evidence,
            "upsampling": upsampling,
            "feature_norm": feature_norm,
            "edges": edges,
        }
        self.record: dict[str, Any] = {}
        self.encoder = encoder
        source = classifier if encoder is None else encoder
        self.head = AttributionHead(
            source.feature_channels,
            [round(source.image_size[0] / grid[0]) for grid in source.feature_grids],
            class_dim=classifier.class_weight.shape[1] if class_vector == "weights" else 0,
            num_classes=classifier.num_classes if class_vector == "embedding" else None,
            width=width,
            upsampling=upsampling,
            feature_norm=feature_norm,
            edges=edges,
        ).to(self.device)

    def to(self, device: torch.device | str) -> AmortizedExplainer:
        """Move classifier, encoder and head."""
        self.classifier.to(device)
        if self.encoder is not None:
            self.encoder.to(device)
        self.head.to(device)
        return self

    def explain(self, images: Tensor, targets: Targets = None) -> Explanation:
        """Maps and logits of a batch, from one pass; arguments as in :meth:`attribute`."""
        images = some_images(images, self.device)
        training = self.head.training
        self.head.eval()
        try:
            with torch.no_grad(), named_size(self.classifier, images):
                output = self.encode(images)
                targets = self.classifier.resolve_targets(targets, output.logits)
                return Explanation(self.decode(output, images, targets).float(), output.logits, targets)
        finally:
            self.head.train(training)

    @torch.no_grad()
    def encode(self, images: Tensor) -> ClassifierOutput:
        """Logits and features of images ``(batch, 3, H, W)`` in [0, 1]; ``final`` is always the classifier's."""
        output = self.classifier.forward_features(images)
        if self.encoder is None:
            return output
        # An encoder of another size sees the same picture at its own.
        features = self.encoder(resize(images, self.encoder.image_size, "area")).features
        return output._replace(features=features)

    def decode(
        self, output: ClassifierOutput, images: Tensor, targets: Tensor, *, head: AttributionHead | None = None
    ) -> Tensor:
        """Maps ``(batch, 1, H, W)`` of the targets ``(batch,)``; differentiable in the parameters of the head.

        ``head`` stands in for the explainer's own, for instance a copy that is being refined.
        """
        with torch.no_grad():
            evidence = self.classifier.evidence(output.final, targets) if self.options["evidence"] else None
            weights = self.options["class_vector"] == "weights"
            vectors = self.classifier.class_vectors(targets) if weights else None
        head = self.head if head is None else head
        return head(output.features, targets, images, class_vectors=vectors, evidence=evidence)

    def save(
        self,
        folder: str | Path,
        *,
        training: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        with_backbone: bool = False,
    ) -> Path:
        """Write an artefact that :func:`aha.load` reads; see :func:`aha.export.save_artifact`."""
        from aha.export.artifact import save_artifact  # a floor above this one

        return save_artifact(self, folder, training=training, metrics=metrics, with_backbone=with_backbone)

    def _attribute(self, images: Tensor, targets: Tensor | None) -> Tensor:
        return self.explain(images, targets).maps


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


@contextmanager
def named_size(classifier: FrozenClassifier, images: Tensor) -> Iterator[None]:
    """Say which size the classifier takes where timm asserts that it isn't this one."""
    try:
        yield
    except AssertionError as error:
        given, taken = tuple(images.shape[-2:]), classifier.image_size
        if given == taken:
            raise
        msg = (
            f"images are {given[0]}×{given[1]}, {classifier.name} takes {taken[0]}×{taken[1]}: resize them, or build "
            f"the classifier with image_size={given}."
        )
        raise ValueError(msg) from error


def some_images(images: Tensor, device: torch.device | None = None) -> Tensor:
    """:func:`as_images` of at least one image: there is nothing to explain in an empty batch."""
    images = as_images(images, device)
    if not images.numel():
        msg = f"There is no image to explain: the batch is {tuple(images.shape)}. Leave empty batches out."
        raise ValueError(msg)
    return images


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
        low, high = torch.stack(images.detach().aminmax()).tolist()
        if not (low >= -1e-3 and high <= 1 + 1e-3):
            msg = (
                f"images must lie in [0, 1], got values from {low:.3g} to {high:.3g}. "
                "Normalisation happens inside the classifier: pass plain pixels (or uint8), "
                "clamped after a bicubic resize."
            )
            raise ValueError(msg)
    return images if images.dtype == torch.float64 else images.float()
