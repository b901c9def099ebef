"""Hard ranks, fractions and areas."""

from __future__ import annotations

import pytest
import torch

from aha.perturbation import auc, fractions_to_counts, pixel_ranks


def test_ranks_by_loop_with_ties():
    maps = torch.randint(-3, 3, (4, 1, 7, 9)).float()
    ranks = pixel_ranks(maps)
    for flat, rank in zip(maps.flatten(1).tolist(), ranks.tolist(), strict=True):
        order = sorted(range(len(flat)), key=lambda i: (-flat[i], i))
        assert [rank[i] for i in order] == list(range(len(flat)))


def test_constant_maps_rank_in_reading_order():
    assert pixel_ranks(torch.zeros(1, 1, 3, 4)).tolist() == [list(range(12))]


def test_signed_maps_are_not_folded():
    assert pixel_ranks(torch.tensor([[[[-5.0, 1.0, 0.0]]]])).tolist() == [[2, 0, 1]]


def test_increasing_transforms_change_nothing():
    maps = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(pixel_ranks(maps), pixel_ranks(maps.exp()))
    assert torch.equal(pixel_ranks(maps), pixel_ranks(3 * maps - 7))


def test_nan_is_least_important_and_infinity_is_ordered():
    maps = torch.tensor([[[[torch.nan, 1.0, -torch.inf, torch.inf, torch.nan, -2.0]]]])
    assert pixel_ranks(maps).tolist() == [[3, 1, 4, 0, 5, 2]]
    assert sorted(pixel_ranks(torch.full((1, 1, 2, 3), torch.nan))[0].tolist()) == list(range(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precisions(dtype):
    maps = torch.randperm(48).view(1, 1, 6, 8).to(dtype)
    assert torch.equal(pixel_ranks(maps), pixel_ranks(maps.float()))
    fine = 1 + torch.arange(6).double().view(1, 1, 2, 3) * 1e-12
    assert pixel_ranks(fine).tolist() == [[5, 4, 3, 2, 1, 0]]


def test_counts_and_areas():
    assert fractions_to_counts(torch.linspace(0, 1, 5), 10) == [0, 2, 5, 8, 10]
    assert fractions_to_counts([0.05], 4096) == [205]
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        fractions_to_counts([0.0, 1.2], 100)
    values = torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(auc(values, torch.tensor([0.0, 0.5, 1.0])), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(auc(values, torch.tensor([0.0, 0.2, 1.0])), torch.tensor([0.15 + 0.2, 1.0]))
    assert auc(values.bfloat16(), torch.tensor([0.0, 0.5, 1.0])).dtype == torch.float32
