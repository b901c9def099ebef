"""Cut-outs on photographs: exact masks, splits that share nothing, samples that depend on their index alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader

from aha.data.cutout_datamodule import CutoutDataModule
from aha.data.cutouts import STAMP_CLASSES, CutoutDataset, find_cutouts, photographs, share
from aha.data.train_cutout_classifier import Top, put_together, tokens_before, train_cutout_classifier, train_top
from aha.evaluation.data import blocks, decode_block, open_data

CLASSES = {"disc": ("round/*.png",), "box": ("square/*.png",)}


def draw_cutouts(root: Path, *, count: int = 5) -> str:
    """Opaque red discs and boxes on nothing, below ``root``; the transparent pixels are green."""
    for folder, shape in (("round", "ellipse"), ("square", "rectangle")):
        (root / folder).mkdir(parents=True)
        for i in range(count):
            picture = Image.new("RGBA", (60 + 10 * i, 50), (0, 255, 0, 0))
            getattr(ImageDraw.Draw(picture), shape)((5, 5, 50, 40), fill=(255, 0, 0, 255))
            picture.save(root / folder / f"{i}.png")
    return str(root)


def draw_backgrounds(root: Path, *, count: int = 6) -> str:
    """Blue pictures, each of its own shade."""
    root.mkdir()
    for i in range(count):
        Image.new("RGB", (70, 90), (0, 0, 40 * i + 20)).save(root / f"{i}.png")
    return str(root)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("cutouts")
    return {"stamps": draw_cutouts(root / "stamps"), "backgrounds": draw_backgrounds(root / "photos")}


def test_masks_are_exact(folders: dict[str, str]) -> None:
    data = CutoutDataset("train", **folders, size=56, length=20, classes=CLASSES)
    for i in range(20):
        item = data[i]
        image, mask = item["image"], item["mask"]
        assert image.dtype == torch.uint8 and image.shape == (3, 56, 56)
        assert mask.dtype == torch.bool and mask.shape == (1, 56, 56) and mask.any()
        assert item["label"] in (0, 1) and item["key"] == f"cutout-train-{i:06d}"
        assert torch.equal(mask[0], image[0] > 127)  # red is the object
        assert image[1].max() == 0  # colours under transparent pixels don't bleed in
        assert (image[2][image[0] == 0] == image[2].max()).all()  # where nothing was pasted is background
        covered = mask.float().mean()
        assert 0.05 < covered < 0.75


def test_a_sample_depends_on_its_index_alone(folders: dict[str, str]) -> None:
    short = CutoutDataset("val", **folders, size=32, length=8, classes=CLASSES)
    long = CutoutDataset("val", **folders, size=32, length=10**9, classes=CLASSES)
    for here, there in zip(
        DataLoader(short, batch_size=4), DataLoader(long, batch_size=4, num_workers=1), strict=False
    ):
        assert torch.equal(here["image"], there["image"]) and torch.equal(here["mask"], there["mask"])
        assert torch.equal(here["label"], there["label"]) and here["key"] == there["key"]
    other = CutoutDataset("val", **folders, size=32, length=8, classes=CLASSES, seed=1)
    assert not torch.equal(torch.stack([other[i]["image"] for i in range(8)]), torch.stack([s["image"] for s in short]))
    assert torch.equal(short[-1]["image"], short[7]["image"])
    with pytest.raises(IndexError):
        short[8]


def test_splits_share_no_cutout_and_no_background(folders: dict[str, str]) -> None:
    splits = [CutoutDataset(split, **folders, size=32, classes=CLASSES) for split in ("train", "val", "test")]
    for label, name in enumerate(CLASSES):
        files = [file for data in splits for file in data.files[label]]
        assert sorted(files) == find_cutouts(folders["stamps"], CLASSES)[name]
        assert [len(data.files[label]) for data in splits] == [3, 1, 1]
    keys = [key for data in splits for key in data.background_keys]
    assert len(keys) == len(set(keys)) == 6
    shades = [{int(data[i]["image"][2].max()) for i in range(40)} for data in splits]
    assert not (shades[0] & shades[1] or shades[0] & shades[2] or shades[1] & shades[2])
    assert share(list("abc"), "val") + share(list("abc"), "test") + share(list("abc"), "train") != []
    assert sum(len(share(list("abc"), split)) for split in ("train", "val", "test")) == 3


def test_what_is_missing_is_named(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder of cut-outs .*nowhere.*tuxpaint-stamps-default"):
        CutoutDataset("train", stamps=tmp_path / "nowhere", backgrounds=folders["backgrounds"])
    few = draw_cutouts(tmp_path / "few", count=2)
    with pytest.raises(ValueError, match="Too few cut-outs .*disc 2, box 2"):
        CutoutDataset("train", stamps=few, backgrounds=folders["backgrounds"], classes=CLASSES)
    with pytest.raises(ValueError, match="ball 0, bird 0"):
        CutoutDataset("train", **folders)
    with pytest.raises(ValueError, match="Only 2 backgrounds"):
        two = draw_backgrounds(tmp_path / "two", count=2)
        CutoutDataset("train", stamps=folders["stamps"], backgrounds=two, classes=CLASSES)
    with pytest.raises(ValueError, match="split must be one of 'train', 'val', 'test', got 'all'"):
        CutoutDataset("all", **folders, classes=CLASSES)  # type: ignore[arg-type]
    (tmp_path / "two" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="Background broken.png"):
        photographs(str(tmp_path / "two"), 40)


def test_default_backgrounds_come_with_packages() -> None:
    pytest.importorskip("skimage")
    found = photographs(None, 48)
    assert len(found) == 7 and all(picture.shape == (3, 48, 48) for picture in found.values())


def test_twelve_classes_without_a_pattern_twice() -> None:
    patterns = [pattern for patterns in STAMP_CLASSES.values() for pattern in patterns]
    assert len(STAMP_CLASSES) == 12 and list(STAMP_CLASSES) == sorted(STAMP_CLASSES)
    assert len(patterns) == len(set(patterns)) and not any("cartoon" in pattern for pattern in patterns)


def test_training_batches_go_on_where_a_run_stopped(folders: dict[str, str]) -> None:
    classes = {name: list(patterns) for name, patterns in CLASSES.items()}
    options = {"image_size": 32, "batch_size": 3, "val_length": 5, "eval_batch_size": 2, "classes": classes}
    module = CutoutDataModule(**folders, **options)
    trainer = SimpleNamespace(max_steps=3, accumulate_grad_batches=1, world_size=1, global_rank=0, global_step=0)
    module.trainer = trainer
    whole = list(module.train_dataloader())
    assert len(whole) == 3 and whole[0]["image"].shape == (3, 3, 32, 32)
    assert len({key for batch in whole for key in batch["key"]}) == 9
    trainer.global_step, trainer.max_steps = 2, 1
    assert next(iter(module.train_dataloader()))["key"] == whole[2]["key"]
    counted = [len(batch["key"]) for batch in module.val_dataloader()]
    assert counted == [2, 2, 1] and next(iter(module.test_dataloader()))["mask"].dtype == torch.bool
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        CutoutDataModule(batch_size=0)


def test_evaluation_takes_it_by_name(folders: dict[str, str]) -> None:
    classifier = SimpleNamespace(image_size=(32, 32), class_names=None, num_classes=2, name="tiny")
    options = ", ".join(f"{key}={value!r}" for key, value in (folders | {"classes": CLASSES}).items())
    spec = f"aha.data.cutouts:CutoutDataset(size=32, length=3, {options})"
    samples = open_data(spec, classifier, split="val")  # type: ignore[arg-type]
    assert samples.count == 3 and samples.labelled
    batch = decode_block(next(blocks(samples, 2)))
    assert batch.keys == ["CutoutDataset-val-000000", "CutoutDataset-val-000001"]
    expected = CutoutDataset("val", **folders, size=32, length=3, classes=CLASSES)
    assert torch.equal(batch.images[1], expected[1]["image"]) and torch.equal(batch.masks[1], expected[1]["mask"])
    with pytest.raises(ValueError, match=r"shape \(3, 48, 48\), the classifier takes \(3, 32, 32\)"):
        open_data(spec.replace("size=32", "size=48"), classifier)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="no attribute 'CutoutSet'"):
        open_data("aha.data.cutouts:CutoutSet(size=3)", classifier)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no data set"):
        open_data("aha.data.cutouts:share(names=[])", classifier)  # type: ignore[arg-type]


@torch.no_grad()
def test_trunk_and_top_put_together_do_what_they_did_apart() -> None:
    trunk = timm.create_model("vit_small_patch14_dinov2", pretrained=False, num_classes=0, img_size=28, depth=3).eval()
    top = Top(trunk.blocks[1], 4).eval()
    for parameter in top.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images = torch.randn(2, 3, 28, 28)
    model, kwargs = put_together(trunk, 1, top)
    before = trunk.blocks[0](trunk.norm_pre(trunk._pos_embed(trunk.patch_embed(images))))
    assert torch.allclose(model(images), top(before), atol=1e-4)
    assert kwargs == {"num_classes": 4, "depth": 2, "global_pool": "token"}


def test_the_top_learns(folders: dict[str, str]) -> None:
    trunk = timm.create_model("vit_small_patch14_dinov2", pretrained=False, num_classes=0, img_size=28, depth=2).eval()
    data = CutoutDataset("train", **folders, size=28, length=64, classes=CLASSES)
    tokens = tokens_before(trunk, data, [1])
    assert tokens.by_block[1].shape == (64, 5, 384)
    top = train_top(trunk, 1, tokens, 2, epochs=30, learning_rate=1e-3, seed=0)
    accuracy, loss = top.judge(tokens.by_block[1], tokens.labels)
    assert accuracy > 0.8 and loss < 0.6


def test_the_command_refuses_what_it_can_t_use(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 14"):
        train_cutout_classifier(tmp_path / "a.safetensors", size=100)
    options = folders | {"trunk": str(tmp_path / "none.onnx")}
    with pytest.raises(FileNotFoundError, match="none.onnx"):
        train_cutout_classifier(tmp_path / "a.safetensors", **options)
    assert not np.any([path.suffix == ".safetensors" for path in tmp_path.iterdir()])
