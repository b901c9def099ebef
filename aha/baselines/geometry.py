"""Where tokens lie in the image, read from the model and its outputs, and maps back to image size."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aha.classifier import FrozenClassifier

Upsample = Literal["nearest", "bilinear"]
ANY_CLASSIFIER = "input_gradient, rise, captum:LayerGradCam, captum:IntegratedGradients"


def cannot_serve(classifier: FrozenClassifier, method: str, reason: str) -> ValueError:
    """The one error for a model that a method can't explain: names model, method, reason and what would work."""
    return ValueError(f"{method} can't explain {classifier.name}: {reason} These can: {ANY_CLASSIFIER}.")


def token_grid(classifier: FrozenClassifier, tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of ``tokens`` patch tokens on an image of ``size``; None if they form no grid.

    The patch embedding's own rule comes first; behind it, the factorisation nearest to the image's aspect ratio.
    """
    embed = getattr(classifier.model, "patch_embed", None)
    if hasattr(embed, "dynamic_feat_size"):
        grid = embed.dynamic_feat_size(size)
        if grid[0] * grid[1] == tokens:
            return int(grid[0]), int(grid[1])
    if tokens < 1:
        return None
    aspect = math.log(size[0] / size[1])
    rows = min(
        (r for r in range(1, tokens + 1) if tokens % r == 0), key=lambda r: abs(math.log(r * r / tokens) - aspect)
    )
    grid = rows, tokens // rows
    return grid if abs(math.log(grid[0] / grid[1]) - aspect) < math.log(1.5) else None


def scores_to_map(
    classifier: FrozenClassifier, method: str, scores: Tensor, size: tuple[int, int], *, upsample: Upsample
) -> Tensor:
    """Token scores as a map at image size, prefix tokens dropped.

    Args:
        classifier: the explained model.
        method: for the error.
        scores: ``(batch, tokens)`` with prefix tokens, or ``(batch, h, w)``.
        size: ``(H, W)``.
        upsample: ``"nearest"`` or ``"bilinear"``.

    Returns:
        ``(batch, 1, H, W)``.

    Raises:
        ValueError: if the tokens form no grid on such an image.
    """
    if scores.ndim == 2:
        patches = scores[:, classifier.num_prefix_tokens :]
        grid = token_grid(classifier, patches.shape[1], size)
        if grid is None:
            reason = (
                f"{scores.shape[1]} tokens, {classifier.num_prefix_tokens} of them prefix tokens, form no grid on "
                f"{size[0]}×{size[1]} pixels."
            )
            raise cannot_serve(classifier, method, reason)
        scores = patches.unflatten(1, grid)
    return resize(scores[:, None], size, upsample)


def resize(maps: Tensor, size: tuple[int, int], upsample: Upsample) -> Tensor:
    """Maps ``(batch, 1, h, w)`` at image size ``(H, W)``, in full precision."""
    maps = full_precision(maps)
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    if upsample == "bilinear":
        return F.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    return F.interpolate(maps, size=size, mode="nearest")


def check_upsample(upsample: str) -> Upsample:
    """Refuse any other name."""
    if upsample not in ("nearest", "bilinear"):
        msg = f"upsample must be 'nearest' or 'bilinear', got {upsample!r}."
        raise ValueError(msg)
    return upsample  # type: ignore[return-value]


def full_precision(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def channel_dim(norm: nn.Module, tokens: Tensor) -> int:
    """Which dimension of a norm's output holds its channels: last for tokens and NHWC, 1 for NCHW."""
    if tokens.ndim == 3:
        return -1
    if isinstance(norm, nn.BatchNorm2d | nn.GroupNorm) or type(norm).__name__.endswith("2d"):
        return 1
    return -1
