"""Colours that keep the sign, overlays that match their picture, sheets that can be saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aha.pictures import colour, contact_sheet, diverging, overlay, scale_limit


def lightness(rgb):
    """CIE L* of sRGB in [0, 1]."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    y = linear @ np.array([0.2126, 0.7152, 0.0722])
    return 116 * np.cbrt(y) - 16


def test_the_scale_is_uniform_and_symmetric():
    values = lightness(np.asarray(diverging().colors)[:, :3])
    middle = len(values) // 2
    assert values[middle] > 95
    for side in (values[middle:], values[: middle + 1][::-1]):
        steps = -np.diff(side)
        assert (steps > 0).all()
        assert steps.std() / steps.mean() < 0.15
    assert abs(values[0] - values[-1]) < 6


def test_signs_have_their_own_colours_and_zero_is_neutral():
    picture = colour(torch.tensor([[-2.0, 0.0, 1.0, float("nan")]]), limit=2.0).astype(int)
    assert picture[0, 0, 2] > picture[0, 0, 0] + 80  # blue
    assert np.ptp(picture[0, 1]) <= 3 and picture[0, 1].min() > 235
    assert picture[0, 2, 0] > picture[0, 2, 2] + 40  # red
    assert (picture[0, 3] == 0).all()


def test_scale_limit_survives_outliers_and_constants():
    values = torch.linspace(-1, 1, 10_000).view(100, 100)
    assert scale_limit(values) == pytest.approx(0.995, abs=1e-3)
    values[0, 0] = 1e6
    assert scale_limit(values) < 1.1
    assert scale_limit(torch.zeros(4, 4)) == 1.0
    assert scale_limit(torch.full((4, 4), float("nan"))) == 1.0
    lonely = torch.zeros(100, 100)
    lonely[3, 3] = 5.0
    assert scale_limit(lonely) == 5.0


@pytest.mark.parametrize("as_type", [torch.uint8, torch.float32, torch.bfloat16])
def test_overlays_are_where_the_map_is(as_type):
    image = torch.full((3, 30, 60), 128).to(torch.uint8)
    image = image if as_type == torch.uint8 else (image.float() / 255).to(as_type)
    map_ = torch.zeros(1, 10, 20)
    map_[0, :, :8], map_[0, :, 12:] = 1.0, -1.0
    result = overlay(image, map_).astype(int)
    assert result.shape == (30, 60, 3)
    assert (result[:, :20, 0] - result[:, :20, 2] > 80).all() and (result[:, 40:, 2] - result[:, 40:, 0] > 60).all()
    assert np.abs(result[:, 29:31] - 128).max() <= 6  # where it is zero, the picture shows
    assert (overlay(image, torch.zeros(10, 20)).astype(int) - 128 <= 1).all()


def test_a_picture_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="must be RGB"):
        overlay(torch.zeros(1, 8, 8), torch.zeros(8, 8))
    with pytest.raises(ValueError, match="A map must be"):
        overlay(torch.zeros(3, 8, 8), torch.zeros(2, 8, 8))


def test_contact_sheet(tmp_path):
    images = torch.rand(2, 3, 32, 48)
    maps = {"aha": torch.randn(2, 1, 32, 48), "cdam": torch.randn(2, 1, 32, 48)}
    figure = contact_sheet(images, maps, titles=["seven 98%", "a name, that is far too long for its row 3%"])
    pictures = [axes for axes in figure.axes if axes.images]
    assert len(pictures) == 2 * 4
    texts = [text.get_text().replace("\n", " ") for text in figure.texts]
    assert {"image", "aha: map", "aha: overlay", "cdam", "seven 98%"} <= set(texts)
    assert any(text.endswith("3%") and "…" in text for text in texts)
    figure.savefig(tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10_000
