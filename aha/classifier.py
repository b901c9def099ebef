"""Any image classifier, frozen, in [0, 1] pixel space: logits, features and class vectors from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from aha.backbone import BackboneOutput, FrozenBackbone
from aha.class_token import class_token_logits, reads_class_token


class ClassifierOutput(NamedTuple):
    """What one pass of a :class:`FrozenClassifier` yields.

    Attributes:
        logits: class logits, ``(batch, classes)``.
        features: intermediate maps, shallow to deep, each ``(batch, channels, h, w)``.
        final: the last map, as it enters the classifier's own head, ``(batch, channels, h, w)``.
    """

    logits: Tensor
    features: tuple[Tensor, ...]
    final: Tensor


class FrozenClassifier(FrozenBackbone):
    """A frozen classifier: a :class:`~aha.backbone.FrozenBackbone` with logits, a link, targets and class vectors.

    Args:
        model: a timm model, or any module that maps normalised images ``(batch, 3, H, W)`` to logits.
        link: ``"softmax"``, or ``"sigmoid"`` for multi-label and single-logit classifiers.
        class_layer: for a module that is not a timm model, the name of its last linear layer (class vectors).
        class_names: one name per class, for display.
        options: mean, std, image_size, feature_layers, num_prefix_tokens, name and copy_model of
            :class:`~aha.backbone.FrozenBackbone`; needed only for a module that is not a timm model.

    Raises:
        ValueError: for a headless model, a missing mean/std/size, or an image size that the model can't take.

    Example:
        >>> classifier = FrozenClassifier.from_timm("test_vit", pretrained=False)
        >>> output = classifier.forward_features(torch.rand(2, 3, 160, 160))
        >>> output.logits.shape, output.final.shape
        (torch.Size([2, 1000]), torch.Size([2, 64, 10, 10]))
    """

    OWN_OPTIONS = ("link", "class_names")

    def __init__(
        self,
        model: nn.Module,
        *,
        link: Literal["softmax", "sigmoid"] = "softmax",
        class_layer: str | None = None,
        class_names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if link not in ("softmax", "sigmoid"):
            msg = f"link must be 'softmax' or 'sigmoid', got {link!r}."
            raise ValueError(msg)
        if getattr(model, "num_classes", None) == 0:
            msg = (
                f"{options.get('name') or type(model).__name__} is a headless backbone (num_classes=0): there is no "
                "class to explain. Pass num_classes=… with checkpoint_path=… of a trained head, or use it as the "
                "encoder of an explainer instead."
            )
            raise ValueError(msg)
        super().__init__(model, **options)
        self.link = link
        self.class_layer = class_layer
        self.class_names = None if class_names is None else list(class_names)
        if self.num_classes == 1 and link == "softmax":
            msg = f"{self.name} has a single logit, whose softmax is always 1: pass link='sigmoid'."
            raise ValueError(msg)
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            msg = f"{len(self.class_names)} class names for {self.num_classes} classes of {self.name}."
            raise ValueError(msg)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits ``(batch, classes)`` of images ``(batch, 3, H, W)`` in [0, 1]."""
        x = self.normalize(images)
        return class_token_logits(self.model, x) if reads_class_token(self.model) else self._tensor(self.model(x))

    def forward_features(self, images: Tensor) -> ClassifierOutput:
        """Logits and feature maps of images ``(batch, 3, H, W)`` in [0, 1], from one pass."""
        raw, (features, final) = self._run(images)
        logits = self._tensor(self.model.forward_head(raw) if self._is_timm else raw)
        return ClassifierOutput(logits, features, final)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Class probabilities ``(batch, classes)`` by the link, in float32 (float64 stays)."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.softmax(-1) if self.link == "softmax" else logits.sigmoid()

    def target_probability(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Probability of each sample's target, ``(batch,)``; targets ``(batch,)``."""
        return self.probabilities(logits).gather(-1, targets.view(-1, 1)).squeeze(-1)

    def resolve_targets(self, targets: int | Sequence[int] | Tensor | None, logits: Tensor) -> Tensor:
        """Turn what a user passes as targets into ``(batch,)`` class indices on the logits' device.

        Args:
            targets: None (the predicted class), one index for all, or one per sample.
            logits: ``(batch, classes)``.

        Raises:
            ValueError: wrong number of targets, or an index outside 0…classes−1.
        """
        batch, classes = logits.shape
        if targets is None:
            return logits.argmax(-1)
        try:
            resolved = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            msg = f"targets must be class indices (integers), got {targets!r}."
            raise ValueError(msg) from error
        if resolved.is_floating_point() or resolved.is_complex() or resolved.dtype == torch.bool:
            msg = f"targets must be class indices (integers), got {resolved.dtype}."
            raise ValueError(msg)
        resolved = resolved.long()
        if resolved.ndim == 0:
            resolved = resolved.expand(batch)
        if resolved.shape != (batch,):
            msg = f"targets must be one index or one per image ({batch}), got shape {tuple(resolved.shape)}."
            raise ValueError(msg)
        # Checked where the targets come from: no device has to be waited for unless they lie on one.
        outside = resolved[(resolved < 0) | (resolved >= classes)]
        if outside.numel():
            msg = f"target {int(outside[0])} is out of range: {self.name} has classes 0…{classes - 1}."
            raise ValueError(msg)
        return resolved.to(logits.device)

    @property
    def class_weight(self) -> Tensor:
        """The classifier's own weight rows, ``(classes, dimension)``."""
        if self._is_timm:
            layers = self.model.get_classifier()
            layers = layers if isinstance(layers, tuple | list) else (layers,)
        else:
            layers = (self.model.get_submodule(self.class_layer),) if self.class_layer else ()
        weights = [layer.weight.flatten(1) for layer in layers if hasattr(layer, "weight")]
        if not weights:
            msg = (
                f"{self.name} has no linear classifier to take class vectors from: "
                "use class_vector='embedding' and evidence=False."
            )
            raise ValueError(msg)
        return weights[0] if len(weights) == 1 else torch.stack(weights).mean(0)

    def class_vectors(self, targets: Tensor) -> Tensor:
        """The classifier's weight rows of the targets, ``(batch, dimension)``; targets ``(batch,)``."""
        return self.class_weight[targets]

    def evidence(self, final: Tensor, targets: Tensor) -> Tensor:
        """The classifier's own head applied at each position: a class activation map of the last features.

        Each position of ``final`` goes through the head's own pre-logit layers (norm, projection) as if it were the
        whole image, and is then multiplied by the target's class vector (Zhou et al. 2016, arXiv 1512.04150).

        Args:
            final: ``(batch, channels, h, w)`` from :class:`ClassifierOutput`.
            targets: ``(batch,)``.

        Returns:
            ``(batch, 1, h, w)``, signed, in logit units up to the class's bias.
        """
        batch, channels, height, width = final.shape
        positions = final.permute(0, 2, 3, 1).reshape(-1, channels)
        if self._is_timm:
            if self._layout == "tokens":
                # Copies of one token fill every slot, so that any pooling (first, mean, attention) returns that token.
                positions = positions[:, None].expand(-1, self.num_prefix_tokens + 1, -1)
            else:
                positions = positions[:, :, None, None] if self._layout == "NCHW" else positions[:, None, None, :]
            positions = self._tensor(self.model.forward_head(positions, pre_logits=True))
        vectors = self.class_vectors(targets).to(positions.dtype)
        if positions.shape[-1] != vectors.shape[-1]:
            msg = (
                f"The last feature layer of {self.name} has {positions.shape[-1]} channels, its class vectors have "
                f"{vectors.shape[-1]}: name the layer that the classifier pools as the last of feature_layers."
            )
            raise ValueError(msg)
        positions = positions.reshape(batch, height * width, -1)
        return torch.einsum("bnd,bd->bn", positions, vectors).view(batch, 1, height, width)

    def _probe_pass(self, image: Tensor) -> BackboneOutput:
        output = self.forward_features(image)
        if output.logits.ndim != 2:
            msg = f"{self.name} returned {tuple(output.logits.shape)}, expected logits (batch, classes)."
            raise ValueError(msg)
        self.num_classes = output.logits.shape[-1]
        return BackboneOutput(output.features, output.final)
