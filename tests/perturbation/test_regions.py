"""Grid regions: partition, orientation, shifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aha.perturbation import pool_scores, region_masks_to_pixels, sample_grid, sample_shift
from aha.perturbation.regions import translate

SIZES = [(24, 36), (25, 38), (23, 17)]


def one_hot(grid: int) -> torch.Tensor:
    return torch.eye(grid * grid)[None]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [1, 4, 7])
@pytest.mark.parametrize("shift", [(0, 0), (1, -2), (-1, 1)])
def test_regions_partition_the_image(size, grid, shift):
    shift = tuple(max(min(s, side // grid // 2), -(side // grid // 2)) for s, side in zip(shift, size, strict=True))
    pixels = region_masks_to_pixels(one_hot(grid), grid, size, shift=shift, blur=False)
    assert set(pixels.unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(pixels.sum(1), torch.ones(1, *size))
    assert (pixels.flatten(2).sum(-1) > 0).all()
    blurred = region_masks_to_pixels(one_hot(grid), grid, size, shift=shift)
    torch.testing.assert_close(blurred.sum(1), torch.ones(1, *size))
    assert blurred.min() >= 0 and blurred.max() <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [3, 4, 7])
def test_masks_by_loop(size, grid):
    masks = torch.rand(2, 3, grid * grid)
    pixels = region_masks_to_pixels(masks, grid, size, blur=False)
    for y in range(size[0]):
        for x in range(size[1]):
            region = (y * grid // size[0]) * grid + x * grid // size[1]
            assert torch.equal(pixels[:, :, y, x], masks[:, :, region])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [1, 3, 7])
def test_pooling_by_loop(size, grid):
    maps = torch.randn(2, 1, *size, dtype=torch.float64)
    scores = pool_scores(maps, grid)
    for region in range(grid * grid):
        row, column = divmod(region, grid)
        top, bottom = row * size[0] // grid, -(-(row + 1) * size[0] // grid)
        left, right = column * size[1] // grid, -(-(column + 1) * size[1] // grid)
        torch.testing.assert_close(scores[:, region], maps[:, 0, top:bottom, left:right].mean((1, 2)))


@pytest.mark.parametrize("shift", [(0, 0), (2, 3), (-2, -3), (0, 4)])
def test_pooling_and_masking_agree_where_the_region_lies(shift):
    """A map that is high in one pixel gives its best score to the region whose mask covers that pixel."""
    size, grid = (24, 36), 4
    for y, x in ((5, 8), (12, 20), (18, 9)):
        maps = torch.zeros(1, 1, *size)
        maps[..., y, x] = 1
        best = int(pool_scores(maps, grid, shift=shift).argmax())
        pixels = region_masks_to_pixels(one_hot(grid), grid, size, shift=shift, blur=False)
        assert pixels[0, best, y, x] == 1


def test_translate_moves_down_and_right_with_reflection():
    maps = torch.arange(20.0).view(1, 1, 4, 5)
    moved = translate(maps, (1, 2))
    assert torch.equal(moved[..., 1:, 2:], maps[..., :-1, :-2])
    assert torch.equal(moved[..., 0, 2:], maps[..., 1, :-2])
    for shift in ((1, 2), (-1, 0), (0, -3), (-2, 2)):
        expected = np.pad(maps[0, 0].numpy(), 4 - 1, mode="reflect")
        expected = expected[3 - shift[0] : 7 - shift[0], 3 - shift[1] : 8 - shift[1]]
        np.testing.assert_array_equal(translate(maps, shift)[0, 0].numpy(), expected)
    assert translate(maps, (0, 0)) is maps


def test_samplers():
    generator = torch.Generator().manual_seed(0)
    grids = {sample_grid(3, 6, generator=generator) for _ in range(200)}
    assert grids == {3, 4, 5, 6}
    shifts = {sample_shift(4, (24, 40), 0.5, generator=generator) for _ in range(2000)}
    assert {s[0] for s in shifts} == set(range(-3, 4))
    assert {s[1] for s in shifts} == set(range(-5, 6))
    assert sample_shift(4, (24, 40), 0.0) == (0, 0)
    repeat = [sample_shift(4, (24, 40), 0.5, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert repeat[0] == repeat[1]


def test_full_precision_under_autocast_and_gradients():
    masks = torch.rand(1, 2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: region_masks_to_pixels(m * 0.9, 3, (10, 13), shift=(1, -1)), (masks,))
    maps = torch.randn(1, 1, 10, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: pool_scores(m, 3, shift=(1, -1)), (maps,))
    plain = region_masks_to_pixels(masks.float(), 3, (10, 13))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(region_masks_to_pixels(masks.float(), 3, (10, 13)), plain)


def test_a_grid_that_does_not_fit():
    with pytest.raises(ValueError, match="9×9 regions doesn't fit maps of 8×12"):
        pool_scores(torch.zeros(1, 1, 8, 12), 9)


def test_masks_of_any_strides():
    masks = torch.rand(9, 2, 3)
    assert torch.equal(
        region_masks_to_pixels(masks.permute(2, 1, 0), 3, (10, 13)),
        region_masks_to_pixels(masks.permute(2, 1, 0).contiguous(), 3, (10, 13)),
    )


def test_mask_blur_by_loop():
    """σ 1, 7 taps, reflected borders, on a mask of one region in a corner."""
    masks = torch.rand(1, 1, 9, dtype=torch.float64)
    hard = region_masks_to_pixels(masks, 3, (10, 13), blur=False)[0, 0].numpy()
    taps = np.exp(-0.5 * np.arange(-3, 4) ** 2.0)
    taps /= taps.sum()
    padded = np.pad(hard, 3, mode="reflect")
    expected = [[taps @ padded[y : y + 7, x : x + 7] @ taps for x in range(13)] for y in range(10)]
    np.testing.assert_allclose(region_masks_to_pixels(masks, 3, (10, 13))[0, 0].numpy(), expected, atol=1e-12)
