"""The embedded demo: scenes, splits, weights and what the two classifiers must do."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aha.classifier import FrozenClassifier
from aha.data import demo, train_demo_classifier
from aha.data.demo import DEMO_WEIGHTS_SHA256, WEIGHTS_FOLDER, DemoDataset, digit_pool, load_demo_classifier
from aha.data.demo_scenes import IndexedRandom, draw_scenes
from aha.data.train_demo_classifier import _erase, _scenes, _targets, measure


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


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_shipped_classifiers_do_what_the_demo_needs(name: str) -> None:
    classifier = load_demo_classifier(name)
    batch = DemoDataset("test").batch(range(512))
    with torch.no_grad():
        predicted = classifier(batch["image"].float() / 255).argmax(-1)
    assert (predicted == batch["label"]).float().mean() >= 0.97
    found = measure(lambda images: classifier.probabilities(classifier(images)), count=128)
    assert found["accuracy"] >= 0.94  # fewer scenes, another stream
    assert 0.38 <= found["first"] <= 0.55 and 0.38 <= found["second"] <= 0.55
    assert found["both_on_top"] >= 0.7
    assert found["largest_on_clutter"] <= 0.2


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_shipped_weights_are_small_and_verified(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = WEIGHTS_FOLDER / f"{name}.safetensors"
    assert shipped.stat().st_size <= 1_000_000
    classifier = load_demo_classifier(name)
    assert all(p.dtype == torch.float32 for p in classifier.model.parameters())
    assert classifier.num_classes == 10 and classifier.image_size == (64, 64)
    assert classifier.forward_features(torch.rand(1, 3, 64, 64)).final.shape[-2:] == (8, 8)
    monkeypatch.setattr(demo, "WEIGHTS_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="reinstall"):
        load_demo_classifier(name)
    content = bytearray(shipped.read_bytes())
    content[-1] ^= 1
    (tmp_path / f"{name}.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=DEMO_WEIGHTS_SHA256[name][:12]):
        load_demo_classifier(name)
    with pytest.raises(ValueError, match="'vit', 'convnext'"):
        load_demo_classifier("resnet")


def test_erased_digits_fade_to_undecided() -> None:
    images, masks, onehot = _scenes("train", 0, 0, (0, 8, 8))
    erased, left = _erase(images, masks, torch.Generator().manual_seed(0))
    assert erased.shape == images.shape and left.shape == (16, 2) and (left <= 1).all() and left.min() < 0.5
    assert torch.allclose(_targets(onehot, torch.ones(16, 2)), onehot.sum(1) / onehot.sum((1, 2))[:, None])
    assert torch.allclose(_targets(onehot, torch.zeros(16, 2)), torch.full((16, 10), 0.1))
    assert torch.allclose(_targets(onehot, left).sum(1), torch.ones(16))


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_the_recipe_runs_and_its_file_loads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_demo_classifier, "measure", lambda *_, **__: {"accuracy": 0.1})
    files = [tmp_path / "new" / "once.safetensors", tmp_path / "again.safetensors"]
    for output in files:
        found = train_demo_classifier.train_demo_classifier(name, output, steps=4, batch_size=8)
        assert found == {"accuracy": 0.1}
    assert files[0].read_bytes() == files[1].read_bytes()
    architecture, options = demo.DEMO_CLASSIFIERS[name]
    FrozenClassifier.from_timm(architecture, checkpoint_path=str(files[0]), image_size=64, **options)
