"""Reference images against slow float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aha.perturbation import REFERENCES, is_constant, make_reference
from aha.perturbation.references import IMAGENET_MEAN, rise_kernel

MEAN = torch.tensor([0.3, 0.5, 0.6]).view(1, 3, 1, 1)


def gaussian(taps: int, sigma: float) -> np.ndarray:
    weights = np.exp(-0.5 * ((np.arange(taps) - taps // 2) / sigma) ** 2)
    return weights / weights.sum()


def slow_filter(image: np.ndarray, kernel: np.ndarray, border) -> np.ndarray:
    """A separable filter of one (H, W) channel by loops; ``border(index, side)`` gives an index, or None for zero."""
    height, width = image.shape
    reach = len(kernel) // 2
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            for dy, ky in enumerate(kernel):
                row = border(y + dy - reach, height)
                for dx, kx in enumerate(kernel):
                    column = border(x + dx - reach, width)
                    if row is not None and column is not None:
                        out[y, x] += ky * kx * image[row, column]
    return out


def reflect(index: int, side: int) -> int:
    index = abs(index)
    return 2 * (side - 1) - index if index >= side else index


def zero(index: int, side: int) -> int | None:
    return index if 0 <= index < side else None


@pytest.mark.parametrize(("height", "width"), [(21, 24), (7, 12)])
def test_blur(height, width):
    images = torch.rand(1, 3, height, width)
    taps = min(37, 2 * min(height, width) - 1)
    expected = [slow_filter(c.double().numpy(), gaussian(taps, 37.0), reflect) for c in images[0]]
    blurred = make_reference(images, "blur")[0].double()
    np.testing.assert_allclose(blurred.numpy(), np.stack(expected), atol=1e-6)


def test_tis_blur():
    images = torch.rand(1, 3, 9, 14)
    expected = [slow_filter(c.double().numpy(), gaussian(11, 5.0), reflect) for c in images[0]]
    np.testing.assert_allclose(make_reference(images, "tis_blur")[0].numpy(), np.stack(expected), atol=1e-6)


def test_rise_blur_pads_with_zero_in_normalised_space():
    images = torch.rand(1, 3, 8, 13)
    std = np.array([0.2, 0.25, 0.3])
    expected = []
    for channel, mean, deviation in zip(images[0].double().numpy(), MEAN.flatten().double().numpy(), std, strict=True):
        normalised = (channel - mean) / deviation
        expected.append(slow_filter(normalised, rise_kernel().numpy(), zero) * deviation + mean)
    result = make_reference(images, "rise_blur", data_mean=MEAN)
    np.testing.assert_allclose(result[0].numpy(), np.stack(expected), atol=1e-6)


def test_rise_kernel_is_the_filtered_impulse():
    """A unit impulse in an array of 11, filtered by loops with half-sample symmetric borders and a cut at 4 σ."""
    taps, sigma, reach = 11, 5.0, 20
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights /= weights.sum()
    impulse = np.zeros(taps)
    impulse[taps // 2] = 1
    padded = np.pad(impulse, 2 * taps, mode="symmetric")
    expected = [
        sum(weights[reach + d] * padded[2 * taps + i + d] for d in range(-reach, reach + 1)) for i in range(taps)
    ]
    np.testing.assert_allclose(rise_kernel().numpy(), expected, atol=1e-12)


def test_constants():
    images = torch.rand(2, 3, 4, 5)
    assert torch.equal(make_reference(images, "black"), torch.zeros_like(images))
    mean = make_reference(images, "mean")
    torch.testing.assert_close(mean, torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1).expand_as(images))
    torch.testing.assert_close(make_reference(images, "data_mean", data_mean=MEAN), MEAN.expand_as(images))


@pytest.mark.parametrize("kind", REFERENCES)
def test_every_kind(kind):
    images = torch.rand(2, 3, 16, 24)
    reference = make_reference(images, kind, data_mean=MEAN)
    assert reference.shape == images.shape
    assert reference.dtype == images.dtype
    assert 0 <= reference.min() and reference.max() <= 1
    # One image alone gets what it gets in a batch, and constant means equal for all.
    torch.testing.assert_close(make_reference(images[1:], kind, data_mean=MEAN)[0], reference[1])
    assert is_constant(kind) == torch.equal(reference[0], reference[1])
    assert make_reference(images.double(), kind, data_mean=MEAN).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(make_reference(images, kind, data_mean=MEAN), reference)


def test_a_flat_image_stays_flat_and_tiny_images_work():
    flat = torch.full((1, 3, 12, 9), 0.25)
    for kind in ("blur", "tis_blur"):
        torch.testing.assert_close(make_reference(flat, kind), flat)
    assert make_reference(torch.rand(1, 3, 1, 1), "blur").shape == (1, 3, 1, 1)


def test_refusals():
    images = torch.rand(1, 3, 8, 8)
    with pytest.raises(ValueError, match="'white'.*black, mean, blur"):
        make_reference(images, "white")
    with pytest.raises(ValueError, match="data_mean"):
        make_reference(images, "rise_blur")
