"""The embedded demo: scenes, splits, weights and what the two classifiers must do."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aha.data.demo import DemoDataset, digit_pool
from aha.data.demo_scenes import IndexedRandom, draw_scenes


def test_item_format() -> None:
    item = DemoDataset("test", length=18)[17]
    assert sorted(item) == ["image", "key", "label", "mask"]
    assert item["image"].dtype == torch.uint8 and item["image"].shape == (3, 64, 64)
    assert item["mask"].dtype == torch.bool and item["mask"].shape == (1, 64, 64)
    assert isinstance(item["label"], int) and item["key"] == "demo-test-1-000017"
    two = DemoDataset("val", digits=2, length=2)[1]
    assert sorted(two) == ["image", "key", "label", "label2", "mask", "mask2"]


@pytest.mark.parametrize("digits", [1, 2])
def test_a_sample_depends_on_its_index_alone(digits: int) -> None:
    cached = DemoDataset("train", digits=digits, length=70)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    lazy = DemoDataset("train", digits=digits, length=10**9, cache=False)
    for index in (0, 31, 32, 69):
        for key, value in cached[index].items():
            assert key == "key" or torch.equal(torch.as_tensor(lazy[index][key]), torch.as_tensor(value))
    shuffled = lazy.batch([69, 3, 31])
    assert torch.equal(shuffled["image"], cached.batch([69, 3, 31])["image"])
    assert shuffled["key"][0] == f"demo-train-{digits}-000069"
    other = DemoDataset("train", digits=digits, length=4, seed=1)
    assert not torch.equal(other[0]["image"], cached[0]["image"])


def test_workers_do_not_matter() -> None:
    data = DemoDataset("val", length=24, cache=False)
    batches = [list(DataLoader(data, batch_size=8, num_workers=workers)) for workers in (0, 2)]
    for here, there in zip(*batches, strict=True):
        assert torch.equal(here["image"], there["image"]) and torch.equal(here["label"], there["label"])
        assert here["key"] == there["key"] and here["mask"].shape == (8, 1, 64, 64)


def test_splits_share_no_digit_and_have_all_classes() -> None:
    pools = {split: digit_pool(split) for split in ("train", "val", "test")}
    rows = np.concatenate([rows for _, _, rows in pools.values()])
    assert len(rows) == len(set(rows.tolist())) == 1797
    pictures = [{p.tobytes() for p in pictures} for pictures, _, _ in pools.values()]
    assert not (pictures[0] & pictures[2] or pictures[0] & pictures[1] or pictures[1] & pictures[2])
    for _, labels, _ in pools.values():
        assert np.bincount(labels).min() >= 10 and (np.diff(labels) >= 0).all()


@pytest.mark.parametrize("digits", [0, 1, 2])
def test_masks_are_the_pixels_that_were_painted(digits: int) -> None:
    pictures, labels, _ = digit_pool("test")
    scenes = draw_scenes(pictures, labels, seed=5, indices=range(100), digits=digits)
    painted = scenes.masks.any(axis=1)
    changed = (scenes.images != scenes.backgrounds).any(axis=1)
    assert not (changed & ~painted).any()
    assert digits == 0 or changed[painted].mean() > 0.98  # the faintest edges may round to the same byte
    assert digits == 0 or scenes.masks.sum(axis=(2, 3)).min() > 40
    assert (scenes.masks.sum(axis=1) <= 1).all()
    assert (labels[scenes.sources] == scenes.labels).all()


def test_two_digits_are_of_different_classes_and_all_classes_come_up() -> None:
    batch = DemoDataset("train", digits=2, length=300).batch(range(300))
    assert (batch["label"] != batch["label2"]).all()
    assert not (batch["mask"] & batch["mask2"]).any()
    assert len(batch["label"].unique()) == len(batch["label2"].unique()) == 10


def test_random_numbers_look_uniform_and_independent() -> None:
    numbers = IndexedRandom(3, range(400)).uniform(0, 1, 400)
    assert abs(numbers.mean() - 0.5) < 0.005 and abs(numbers.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(numbers)[np.triu_indices(400, 1)]).max() < 0.3
    assert abs(np.corrcoef(numbers.T)[np.triu_indices(400, 1)]).max() < 0.3


@pytest.mark.parametrize("options", [{"split": "dev"}, {"digits": 3}, {"length": 0}])
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DemoDataset(**options)
    with pytest.raises(IndexError):
        DemoDataset("val", length=3)[3]
