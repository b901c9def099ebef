"""Folders of pictures: labels, names, unreadable files, exact counts."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from aha.data.folder import FolderDataset
from aha.data.loaders import EvalLoader, TrainLoader
from aha.data.pictures import BadPicture
from aha.data.pipeline import Recipe, Slot
from tests.data.pictures_on_the_fly import encode, plain

LENIENT = Recipe(image_size=(8, 8), batch_size=4, max_bad_rate=0.5)


@pytest.fixture
def root(tmp_path):
    for name, value in {
        "wolf/deep/er/b.png": 1, "wolf/a.PNG": 2, "äffin/猫 1.jpg": 3, "äffin/猫 1.png": 4, "loose.png": 5,
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(plain(value), "JPEG" if name.endswith("jpg") else "PNG"))
    (tmp_path / "wolf/a.mask.png").write_bytes(encode(np.eye(9, 12, dtype=np.uint8)))
    (tmp_path / "wolf/notes.txt").write_text("no picture")
    (tmp_path / "wolf/._a.png").write_bytes(b"left by a Mac")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/c.png").write_bytes(encode(plain(9)))
    return tmp_path


def test_nested_class_folders_and_loose_pictures(root):
    dataset = FolderDataset(root, image_size=(8, 10))
    assert dataset.classes == ["wolf", "äffin"]
    assert {item["key"]: item["label"] for item in map(dataset.__getitem__, range(len(dataset)))} == {
        "loose.png": -1, "wolf/a.PNG": 0, "wolf/deep/er/b.png": 0, "äffin/猫 1.jpg": 1, "äffin/猫 1.png": 1,
    }  # fmt: skip
    item = dataset[1]
    assert item["image"].shape == (3, 8, 10) and item["image"][0, 0, 0] == 2
    assert item["mask"].shape == (1, 8, 10) and "mask" not in dataset[0]


def test_flat_folder(tmp_path):
    for value in range(3):
        (tmp_path / f"{value}.png").write_bytes(encode(plain(value)))
    dataset = FolderDataset(tmp_path)
    assert dataset.classes == [] and [dataset[n]["label"] for n in range(3)] == [-1] * 3


def test_clear_errors(root, tmp_path_factory):
    with pytest.raises(ValueError, match="no picture below"):
        FolderDataset(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ValueError, match="äffin"):
        FolderDataset(root, classes=["wolf"])
    assert FolderDataset(root, classes=["x", "äffin", "wolf"])[1]["label"] == 2


def test_unreadable_files_are_skipped_and_counted(root):
    (root / "wolf/broken.jpg").write_bytes(b"\xff\xd8nothing")
    (root / "wolf/gone.png").symlink_to(root / "nowhere.png")
    dataset = FolderDataset(root)
    with pytest.raises(BadPicture):
        dataset[dataset.files.index("wolf/broken.jpg")]
    loader = EvalLoader(dataset, LENIENT, workers=1)
    assert sum(len(batch["key"]) for batch in loader) == 5 and loader.tally.bad == 2


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_evaluation_is_exact_and_training_uses_every_picture(root, world):
    dataset = FolderDataset(root)
    slots = [Slot(rank, world, worker, 2) for rank in range(world) for worker in range(2)]
    assert sorted(s.key for slot in slots for s in dataset.evaluate(slot)) == sorted(dataset.files)
    if len(slots) <= 5:
        share = [s.key for slot in slots for s in islice(dataset.train((0, 0, 0), slot, 0), 5)]
        assert set(share) == set(dataset.files)
    else:  # more readers than pictures: none of them starves
        assert all(len(list(islice(dataset.train((0, 0, 0), slot, 0), 3))) == 3 for slot in slots)


def test_training_order_skips_and_resumes(root):
    dataset = FolderDataset(root)
    order = [s.key for s in islice(dataset.train((0, 1, 2), Slot(), 0), 20)]
    assert sorted(order[:5]) == sorted(dataset.files)  # one permutation after another
    assert [s.key for s in islice(dataset.train((0, 1, 2), Slot(), 7), 13)] == order[7:]
    whole = [batch["key"] for batch in TrainLoader(dataset, LENIENT, steps=5)]
    broken = TrainLoader(dataset, LENIENT, steps=5)
    began = iter(broken)
    next(began), next(began)
    resumed = TrainLoader(dataset, LENIENT, steps=5)
    resumed.load_state_dict(broken.state_dict())
    assert [batch["key"] for batch in resumed] == whole[2:]
