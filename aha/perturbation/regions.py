"""Grid regions: pooling a map into scores, and region masks back to pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kornia.filters import filter2d_separable, get_gaussian_kernel1d
from torch import Tensor


def sample_grid(low: int, high: int, *, generator: torch.Generator | None = None) -> int:
    """One grid size per step, uniform on low…high, for the whole batch (arXiv 2604.05819, released code)."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def sample_shift(
    grid: int, size: tuple[int, int], max_fraction: float, *, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """A shift ``(dy, dx)`` of the grid in pixels, uniform on ± ``max_fraction`` of one region's side."""
    reach = [round((side // grid) * max_fraction) for side in size]
    dy, dx = (int(torch.randint(-r, r + 1, (), generator=generator)) for r in reach)
    return dy, dx


def pool_scores(maps: Tensor, grid: int, *, shift: tuple[int, int] = (0, 0)) -> Tensor:
    """Mean of a map over each region of a ``grid × grid`` partition.

    Where a side is no multiple of the grid, the outermost pixels of neighbouring regions count in both.

    Args:
        maps: ``(batch, 1, H, W)``.
        grid: regions per side; n = grid².
        shift: the map is moved by ``(dy, dx)`` pixels with reflected borders first, which moves the grid against it.

    Returns:
        Scores ``(batch, n)``, row-major.
    """
    height, width = maps.shape[-2:]
    if grid > min(height, width):
        msg = f"A grid of {grid}×{grid} regions doesn't fit maps of {height}×{width} pixels."
        raise ValueError(msg)
    return F.adaptive_avg_pool2d(translate(maps, shift), grid).flatten(1)


def region_masks_to_pixels(
    masks: Tensor, grid: int, size: tuple[int, int], *, shift: tuple[int, int] = (0, 0), blur: bool = True
) -> Tensor:
    """Region masks as soft pixel masks: nearest upsampling, shifted back, blurred (σ 1, 7 taps, reflected), clamped.

    Args:
        masks: ``(batch, K, n)`` in [0, 1], n = grid².
        grid: regions per side.
        size: ``(H, W)``.
        shift: what :func:`pool_scores` used.
        blur: soften the region borders (arXiv 2604.05819, released code).

    Returns:
        ``(batch, K, H, W)`` in [0, 1].
    """
    batch, count, _ = masks.shape
    with torch.autocast(masks.device.type, enabled=False):
        vertical, horizontal = (
            _spread(grid, side, -by, blur=blur, like=masks) for side, by in zip(size, shift, strict=True)
        )
        pixels = vertical @ masks.reshape(batch, count, grid, grid) @ horizontal.T
    return pixels.clamp(0, 1)


def _spread(grid: int, side: int, shift: int, *, blur: bool, like: Tensor) -> Tensor:
    """What each region of one axis gives to each pixel, ``(side, grid)``.

    Upsampling, shift, reflection and blur are linear and act on each axis by itself, so that two small matrix
    products do for a mask what they would do pixel by pixel, and the gradient comes back as cheaply.
    """
    columns = F.interpolate(
        torch.eye(grid, device=like.device, dtype=like.dtype)[None, None], size=(side, grid), mode="nearest"
    )
    columns = translate(columns, (shift, 0))
    if blur:
        taps = get_gaussian_kernel1d(7, 1.0, device=like.device, dtype=like.dtype)
        columns = filter2d_separable(columns, torch.ones_like(taps[:, :1]), taps, border_type="reflect")
    return columns[0, 0]


def translate(maps: Tensor, shift: tuple[int, int]) -> Tensor:
    """Move maps by ``(dy, dx)`` pixels, filling from reflected borders."""
    dy, dx = shift
    if dy == 0 and dx == 0:
        return maps
    height, width = maps.shape[-2:]
    padded = F.pad(maps, (max(dx, 0), max(-dx, 0), max(dy, 0), max(-dy, 0)), mode="reflect")
    top, left = max(-dy, 0), max(-dx, 0)
    return padded[..., top : top + height, left : left + width]
