"""Reference images: what a deleted pixel is replaced by."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from kornia.filters import filter2d_separable, gaussian_blur2d
from torch import Tensor

Reference = Literal["black", "mean", "blur", "data_mean", "rise_blur", "tis_blur"]
REFERENCES: tuple[str, ...] = get_args(Reference)
IMAGENET_MEAN = (0.485, 0.456, 0.406)


def make_reference(images: Tensor, kind: Reference, *, data_mean: Tensor | None = None) -> Tensor:
    """The image that deleted pixels are replaced by.

    ``black``, ``mean`` (ImageNet's) and ``blur`` (37 taps, σ 37, reflected borders) are AHA's (arXiv 2604.05819,
    released code). ``data_mean`` is zero after the classifier's own normalisation and ``rise_blur`` is a blur of
    11 taps, σ 5, with zero padding in normalised space: RISE's (arXiv 1806.07421, released code; its taps are flatter
    than a sampled Gaussian, see :func:`rise_kernel`). ``tis_blur`` is a sampled Gaussian of 11 taps, σ 5, reflected
    borders: TIS's (Englebert et al. 2023, released code).

    Args:
        images: ``(batch, 3, H, W)`` in [0, 1].
        kind: one of :data:`REFERENCES`.
        data_mean: the classifier's normalisation mean, ``(1, 3, 1, 1)``; needed by ``data_mean`` and ``rise_blur``.

    Returns:
        ``(batch, 3, H, W)``; constant kinds are an expanded view.
    """
    with torch.autocast(images.device.type, enabled=False):
        return _reference(images, kind, data_mean)


def _reference(images: Tensor, kind: Reference, data_mean: Tensor | None) -> Tensor:
    if kind == "black":
        return images.new_zeros(1, 1, 1, 1).expand_as(images)
    if kind == "mean":
        return images.new_tensor(IMAGENET_MEAN).view(1, 3, 1, 1).expand_as(images)
    if kind == "blur":
        # Reflection needs the border to be smaller than the image.
        taps = min(37, 2 * min(images.shape[-2:]) - 1)
        return gaussian_blur2d(images, (taps, taps), (37.0, 37.0), border_type="reflect")
    if kind == "tis_blur":
        return gaussian_blur2d(images, (11, 11), (5.0, 5.0), border_type="reflect")
    if kind not in REFERENCES:
        msg = f"Unknown reference {kind!r}: choose one of {', '.join(REFERENCES)}."
        raise ValueError(msg)
    if data_mean is None:
        msg = f"Reference {kind!r} needs data_mean: the classifier's normalisation mean, (1, 3, 1, 1)."
        raise ValueError(msg)
    if kind == "data_mean":
        return data_mean.to(images).expand_as(images)
    # Zero padding in normalised space is padding with the data mean in pixel space; the scale drops out.
    mean = data_mean.to(images)
    kernel = rise_kernel().to(images)[None]
    return mean + filter2d_separable(images - mean, kernel, kernel, border_type="constant")


def rise_kernel(taps: int = 11, sigma: float = 5.0) -> Tensor:
    """One axis of RISE's blur kernel, ``(taps,)``, float64, sum 1.

    The released code filters a unit impulse in a ``taps × taps`` array by a Gaussian cut at 4 σ whose tails are
    reflected at the array's edges, so that the kernel's ends are heavier than a sampled Gaussian's: .0880 against
    .0663 at the outermost of 11 taps, .0940 against .1094 in the middle.
    """
    reach = int(4 * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    # Half-sample symmetric reflection has period 2·taps.
    places = (taps // 2 + offsets) % (2 * taps)
    places = torch.where(places < taps, places, 2 * taps - 1 - places)
    return torch.zeros(taps, dtype=torch.float64).scatter_add_(0, places, weights / weights.sum())


def is_constant(kind: str) -> bool:
    """Whether the reference is the same image for every sample, so that it is classified once."""
    return kind in ("black", "mean", "data_mean")
