"""Is the exported graph the same function? Measured on real pictures against the explainer in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aha.explainer import AmortizedExplainer

BATCHES = (1, 3, 8)


class ParityError(RuntimeError):
    """An exported graph differs from the explainer by more than is allowed; nothing was written."""


def sample_pictures(size: Sequence[int], count: int = max(BATCHES)) -> Tensor:
    """Real pictures: crops of scikit-learn's two photographs, ``(count, 3, *size)``, uint8."""
    from sklearn.datasets import load_sample_images

    pictures = [torch.from_numpy(picture.copy()).permute(2, 0, 1) for picture in load_sample_images().images]
    crops = []
    for i in range(count):
        picture = pictures[i % len(pictures)]
        side = int(min(picture.shape[-2:]) * (1.0 - 0.08 * (i // 2)))
        left = (picture.shape[-1] - side) * i // max(count - 1, 1)
        crop = picture[None, :, :side, left : left + side].float()
        crops.append(F.interpolate(crop, size=tuple(size), mode="bilinear", antialias=True, align_corners=False))
    return torch.cat(crops).round().clamp(0, 255).to(torch.uint8)


def check_parity(
    explainer: AmortizedExplainer,
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    tolerance: float,
    pixels: str = "float",
) -> dict[str, Any]:
    """Compare an exported graph with its explainer on real pictures at batch sizes 1, 3 and 8.

    Differences are the largest over all values, relative to the range of the reference's logits or map in each image.
    Half of the targets are −1; the reference is asked for the class that the graph itself found most likely, so
    that a tie within the logits' tolerance isn't mistaken for a wrong map.

    Args:
        explainer: the reference, in float32.
        run: ``(images, targets) -> (logits, maps)``, the exported graph.
        tolerance: the largest difference allowed.
        pixels: ``"float"`` or ``"uint8"``: what the graph takes.

    Returns:
        Figures, plain values.

    Raises:
        ParityError: with the figures in its message.
    """
    pictures = sample_pictures(explainer.classifier.image_size)
    classes = explainer.classifier.num_classes
    rows, agreement = [], []
    for batch in BATCHES:
        images = pictures[:batch] if pixels == "uint8" else pictures[:batch].float() / 255
        targets = torch.tensor([-1 if i % 2 == 0 else i * classes // max(BATCHES) for i in range(batch)])
        logits, maps = (torch.as_tensor(value) for value in run(images, targets))
        reference = explainer.explain(images, torch.where(targets < 0, logits.argmax(-1), targets))
        rows.append(
            {
                "batch": batch,
                "logits": _difference(logits, reference.logits.float().cpu()),
                "map": _difference(maps, reference.maps.cpu()),
            }
        )
        agreement.append((logits.argmax(-1) == reference.logits.argmax(-1).cpu()).float().mean().item())
    worst = max(max(row["logits"], row["map"]) for row in rows)
    figures = {
        "largest_difference": worst,
        "tolerance": tolerance,
        "relative_to": "the range of the reference's values in each image",
        "predictions_agree": min(agreement),
        "pictures": "crops of scikit-learn's china.jpg and flower.jpg",
        "by_batch": rows,
    }
    if worst > tolerance:
        msg = f"The export differs from the explainer by {worst:.2e} of its range; allowed is {tolerance:.0e}: {rows}"
        raise ParityError(msg)
    return figures


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        msg = f"The exported graph returned {tuple(found.shape)}, expected {tuple(expected.shape)}."
        raise ParityError(msg)
    found, expected = found.flatten(1).double(), expected.flatten(1).double()
    spread = (expected.amax(1) - expected.amin(1)).clamp_min(1e-12)
    worst = ((found - expected).abs().amax(1) / spread).max().item()
    return worst if math.isfinite(worst) else math.inf  # NaN would lose every comparison
