"""Reference images: what a deleted pixel is replaced by."""

from __future__ import annotations

from typing import Literal, get_args

from kornia.filters import gaussian_blur2d
from torch import Tensor

Reference = Literal["black", "mean", "blur", "data_mean", "rise_blur"]
REFERENCES: tuple[str, ...] = get_args(Reference)
IMAGENET_MEAN = (0.485, 0.456, 0.406)


def make_reference(images: Tensor, kind: Reference, *, data_mean: Tensor | None = None) -> Tensor:
    """The image that deleted pixels are replaced by.

    ``black``, ``mean`` (ImageNet's) and ``blur`` (37 taps, σ 37, reflected borders) are AHA's (arXiv 2604.05819,
    released code). ``data_mean`` is zero after the classifier's own normalisation and ``rise_blur`` is a blur of
    11 taps, σ 5, with zero padding in normalised space: RISE's (arXiv 1806.07421, released code).

    Args:
        images: ``(batch, 3, H, W)`` in [0, 1].
        kind: one of :data:`REFERENCES`.
        data_mean: the classifier's normalisation mean, ``(1, 3, 1, 1)``; needed by the last two kinds.

    Returns:
        ``(batch, 3, H, W)``; constant kinds are an expanded view.
    """
    if kind == "black":
        return images.new_zeros(1, 1, 1, 1).expand_as(images)
    if kind == "mean":
        return images.new_tensor(IMAGENET_MEAN).view(1, 3, 1, 1).expand_as(images)
    if kind == "blur":
        # Reflection needs the border to be smaller than the image.
        taps = min(37, 2 * min(images.shape[-2:]) - 1)
        return gaussian_blur2d(images, (taps, taps), (37.0, 37.0), border_type="reflect")
    if kind not in REFERENCES:
        msg = f"Unknown reference {kind!r}: choose one of {', '.join(REFERENCES)}."
        raise ValueError(msg)
    if data_mean is None:
        msg = f"Reference {kind!r} needs data_mean: the classifier's normalisation mean, (1, 3, 1, 1)."
        raise ValueError(msg)
    if kind == "data_mean":
        return data_mean.to(images).expand_as(images)
    # Zero padding in normalised space is padding with the data mean in pixel space; the scale drops out.
    return data_mean.to(images) + gaussian_blur2d(
        images - data_mean.to(images), (11, 11), (5.0, 5.0), border_type="constant"
    )


def is_constant(kind: str) -> bool:
    """Whether the reference is the same image for every sample, so that it is classified once."""
    return kind in ("black", "mean", "data_mean")
