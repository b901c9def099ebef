"""Run a named protocol over a batch of maps: one value per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.explainer import as_images
from aha.metrics._maps import map_states
from aha.metrics.protocols import Protocol, get_protocol
from aha.perturbation import automatic_chunk_size, deletion_insertion_curves


class ProtocolResult(NamedTuple):
    """Figures of a batch under one protocol.

    Attributes:
        metrics: one value per sample, ``(batch,)`` float64; NaN for samples excluded (a map that is not finite, an
            unknown label where the label is scored).
        curves: scores at each point, ``(batch, K)``; NaN likewise.
        fractions: nominal share of pixels at each point, ``(K,)``.
        targets: classes scored, ``(batch,)``; −1 for unknown labels.
        constant: maps that rank nothing (all values equal), ``(batch,)`` bool; scored in row-major order.
        forwards: images classified.
    """

    metrics: dict[str, Tensor]
    curves: dict[str, Tensor]
    fractions: Tensor
    targets: Tensor
    constant: Tensor
    forwards: int


@torch.no_grad()
def run_protocol(
    protocol: str | Protocol,
    classifier: FrozenClassifier,
    images: Tensor,
    maps: Tensor,
    targets: int | Sequence[int] | Tensor | None = None,
    *,
    labels: Tensor | None = None,
    chunk_size: int | None = None,
    clean_logits: Tensor | None = None,
    constant_logits: dict[tuple, Tensor] | None = None,
) -> ProtocolResult:
    """Score maps under a protocol.

    Args:
        protocol: a name or settings.
        classifier: the explained model.
        images: ``(batch, 3, H, W)``, float in [0, 1] or uint8.
        maps: ``(batch, 1, H, W)``.
        targets: classes explained; default: the predicted class of the clean image.
        labels: true classes ``(batch,)``, −1 for unknown; scored by protocols with ``target="label"``. Without
            labels those score ``targets``.
        chunk_size: images per classifier forward; None: chosen by device, free memory and size.
        clean_logits: logits of the clean images, where already at hand.
        constant_logits: a dictionary kept between calls, so that a constant reference is classified once in a run.

    Raises:
        ValueError: maps of another shape than the images, or unknown protocol.
    """
    protocol = get_protocol(protocol)
    images = as_images(images, classifier.mean.device)
    batch, _, height, width = images.shape
    if tuple(maps.shape) != (batch, 1, height, width):
        msg = f"maps must be {(batch, 1, height, width)} for images {tuple(images.shape)}, got {tuple(maps.shape)}."
        raise ValueError(msg)
    maps = maps.to(images.device)
    chunk_size = automatic_chunk_size(classifier, images) if chunk_size is None else chunk_size
    finite, constant = map_states(maps)
    fractions, counts = protocol.points(height * width)
    classified = 0
    if clean_logits is None:
        chunks = [classifier(chunk) for chunk in images.split(chunk_size)] if batch else []
        clean_logits = torch.cat(chunks) if chunks else images.new_zeros(0, classifier.num_classes)
        classified = batch
    scored = classifier.resolve_targets(targets, clean_logits)
    use = finite
    if protocol.target == "label" and labels is not None:
        scored = labels.to(images.device).long()
        classifier.resolve_targets(scored[scored >= 0], clean_logits[scored >= 0])
        use = finite & (scored >= 0)

    # Removing the least important pixels first is showing the most important ones: a reversed insertion path.
    removing = protocol.kind == "perturbation"
    result = deletion_insertion_curves(
        classifier,
        images[use],
        maps[use],
        scored[use],
        counts=counts,
        insertion_counts=[height * width - count for count in counts] if removing else counts,
        deletion_reference=protocol.deletion_reference,
        insertion_reference=protocol.deletion_reference if removing else protocol.insertion_reference,
        score=protocol.score,
        chunk_size=chunk_size,
        clean_logits=clean_logits[use],
        constant_logits=constant_logits,
    )
    x = torch.tensor(fractions, dtype=torch.float64, device=images.device)

    def spread(values: Tensor) -> Tensor:
        return values.new_full((batch, *values.shape[1:]), math.nan).index_put((use,), values)

    names = list(protocol.metrics)[:2]
    curves = {name: spread(curve) for name, curve in zip(names, (result.deletion, result.insertion), strict=True)}
    metrics = {name: protocol.area(curve, x) for name, curve in curves.items()}
    if not removing:
        metrics["insertion_minus_deletion"] = metrics["insertion"] - metrics["deletion"]
    return ProtocolResult(metrics, curves, x, scored, constant, classified + result.forwards)
