"""The Lightning data modules: what the trainer gets, resume through a real checkpoint, augmentation, errors."""

from __future__ import annotations

import json
import re

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser

from aha.data.augment import augment_batch
from aha.data.datamodules import FolderDataModule, ShardDataModule
from aha.training.data_tally import DataTally
from tests.data.pictures_on_the_fly import encode, plain, write_shards_of, write_tar


class Recorder(pl.LightningModule):
    """Learns one number from the images' mean; writes down the keys it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[str]] = []
        self.validated: list[str] = []
        self.kinds: set[torch.dtype] = set()

    def training_step(self, batch, _):
        self.seen.append(batch["key"])
        self.kinds.add(batch["image"].dtype)
        return (self.weight - batch["image"].float().mean() / 255) ** 2

    def validation_step(self, batch, _):
        self.validated += batch["key"]
        assert batch["image"].dtype == torch.uint8

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0  # as schedules do: it makes the loader before its time
        return torch.optim.Adam(self.parameters(), 0.1)


def trainer(path, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=path, num_sanity_val_steps=0, **quiet, **options)


@pytest.fixture
def shards(tmp_path):
    found = write_shards_of(tmp_path / "shards", (5, 8, 3, 6, 4))
    info = {"train": {"filenames": [f"part-{n:03d}.tar" for n in range(5)], "shard_lengths": [5, 8, 3, 6, 4]}}
    (tmp_path / "shards/_info.json").write_text(json.dumps({"splits": info}))
    return found


def shard_data(shards, **options):
    common = {"image_size": 8, "batch_size": 4, "num_workers": 0, "shuffle_buffer": 6}
    return ShardDataModule(**{"train": shards, "val": shards, **common, **options})


def test_fit_and_validate(shards, tmp_path):
    module = Recorder()
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(module, shard_data(shards))
    assert [len(keys) for keys in module.seen] == [4] * 12  # 26 // 4 = 6 steps an epoch
    assert module.seen[:6] != module.seen[6:]
    assert sorted(module.validated) == sorted([f"s{n:04d}" for n in range(26)] * 2)
    assert module.kinds == {torch.uint8}


def test_the_run_tells_what_it_skipped(shards, tmp_path, caplog):
    bad = write_tar(tmp_path / "bad.tar", [("empty.png", b""), ("one.png", encode(plain(1, (1, 1)))), ("x.png", b"x")])
    tally = DataTally()
    data = shard_data([*shards, str(bad)], train_samples=80, val=None, max_bad_rate=0.5)
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False, callbacks=[tally]).fit(Recorder(), data)
    assert tally.seen - tally.skipped == 160 and tally.skipped > 0
    first = re.search(r"Epoch 0: (\d+) training samples seen by all ranks, (\d+) skipped as unreadable", caplog.text)
    assert int(first[1]) - int(first[2]) == 80
    assert "rank 0 of 1: skipped" in caplog.text and "empty file (0 bytes) (first: empty)" in caplog.text


def test_test_and_predict(shards, tmp_path):
    class Both(Recorder):
        def test_step(self, batch, _):
            self.validated += batch["key"]

        def predict_step(self, batch, _):
            return batch["key"]

    data = ShardDataModule(test=shards, image_size=8, batch_size=4, num_workers=0)
    module, runner = Both(), trainer(tmp_path, enable_checkpointing=False)
    runner.test(module, data, verbose=False)
    predicted = [key for keys in runner.predict(module, data) for key in keys]
    assert predicted == module.validated == [f"s{n:04d}" for n in range(26)]
    assert data.tally("test").seen == 26 and data.tally("train").seen == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_equals_the_uninterrupted_one(shards, tmp_path, workers):
    whole = Recorder()
    data = {"num_workers": workers, "worker_start": "fork" if workers else None}
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(whole, shard_data(shards, **data))

    class Killed(RuntimeError):
        pass

    class Kill(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 9:  # mid-way in the second epoch
                raise Killed

    keep = pl.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    first = Recorder()
    with pytest.raises(Killed):
        trainer(tmp_path, max_epochs=2, callbacks=[keep, Kill()]).fit(first, shard_data(shards, **data))
    assert first.seen == whole.seen[:9]
    second = Recorder()
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(
        second, shard_data(shards, **data), ckpt_path=tmp_path / "kept/step=8.ckpt", weights_only=True
    )
    assert second.seen == whole.seen[8:]
    assert torch.equal(second.weight, whole.weight)


def test_augmentation_while_training_only(shards, tmp_path):
    module = Recorder()
    data = shard_data(shards, augment=["flip", "random_resized_crop"])
    trainer(tmp_path, max_steps=2, enable_checkpointing=False).fit(module, data)
    assert module.kinds == {torch.float32}


def test_augmentation_moves_masks_along_and_repeats():
    image = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)
    image[:, :, :, :8] = 255
    batch = {"image": image, "mask": image[:, :1] > 0, "key": [str(n) for n in range(64)], "label": torch.zeros(64)}
    before = torch.get_rng_state()
    one = augment_batch(batch, ["flip"], seed=3)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one["image"][:, :1] > 0.5, one["mask"]) and one["mask"].dtype == torch.bool
    flipped = int(one["mask"][:, 0, 0, -1].sum())
    assert 10 < flipped < 54
    assert torch.equal(one["image"], augment_batch(batch, ["flip"], seed=3)["image"])
    assert not torch.equal(one["image"], augment_batch(batch, ["flip"], seed=4)["image"])
    both = augment_batch(batch, ["flip", "random_resized_crop"])
    assert both["image"].shape == image.shape and 0 <= both["image"].min() and both["image"].max() <= 1
    agree = ((both["image"][:, :1] > 0.5) == both["mask"]).float().mean()
    assert agree > 0.95
    photos = {**batch, "image": torch.randint(0, 256, image.shape, dtype=torch.uint8)}
    recoloured = augment_batch(photos, ["color_jitter"], seed=3)
    assert torch.equal(recoloured["mask"], batch["mask"])  # nothing has moved
    changes = (recoloured["image"] - photos["image"] / 255).abs().mean((1, 2, 3))
    assert (
        changes.min() > 0.01
        and changes.std() > 0.01
        and 0 <= recoloured["image"].min() <= recoloured["image"].max() <= 1
    )
    assert torch.equal(recoloured["image"], augment_batch(photos, ["color_jitter"], seed=3)["image"])
    assert "mask" not in augment_batch({k: v for k, v in batch.items() if k != "mask"}, ["random_resized_crop"])


class _Cluster:
    """As much of a trainer as the data module looks at, on rank ``rank`` of ``world``."""

    def __init__(self, rank, world):
        self.global_rank, self.world_size, self.current_epoch, self.global_step, self.training = rank, world, 0, 0, True


def test_ranks_get_equal_steps_and_their_share(shards):
    loaders, got = [], []
    for rank in range(4):
        data = shard_data(shards)
        data.trainer = _Cluster(rank, 4)
        loaders.append(data.train_dataloader())
        got += [key for batch in data.val_dataloader() for key in batch["key"]]
    assert [len(loader) for loader in loaders] == [1] * 4 == [len(list(loader)) for loader in loaders]
    assert sorted(got) == [f"s{n:04d}" for n in range(26)]


def test_fewer_shards_than_ranks(shards):
    got = []
    for rank in range(6):
        data = shard_data(shards)
        data.trainer = _Cluster(rank, 6)
        with pytest.raises(ValueError, match="5 training shards for 6 ranks"):
            data.setup("fit")
        got += [key for batch in data.val_dataloader() for key in batch["key"]]
    assert sorted(got) == [f"s{n:04d}" for n in range(26)]


def test_clear_errors(shards, tmp_path):
    with pytest.raises(ValueError, match="don't fill one batch"):
        shard_data(shards, batch_size=27).train_dataloader()
    with pytest.raises(ValueError, match="no test data"):
        shard_data(shards, val=None).test_dataloader()
    # Validation data stand in for test data that are not given.
    standing_in, given = shard_data(shards), shard_data(shards, test=shards)
    assert [b["key"] for b in standing_in.test_dataloader()] == [b["key"] for b in given.test_dataloader()]
    (tmp_path / "shards/_info.json").unlink()
    with pytest.raises(ValueError, match="train_samples"):
        shard_data(shards).setup("fit")
    assert len(shard_data(shards, train_samples=80).train_dataloader()) == 20
    with pytest.raises(ValueError, match="allow_pipe"):
        shard_data(["pipe:cat x.tar"]).setup("fit")
    for wrong in ({"batch_size": 0}, {"augment": ["blur"]}, {"max_bad_rate": 2}):
        with pytest.raises(ValueError):
            shard_data(shards, **wrong)


def test_folders_share_the_classes_of_training(tmp_path):
    for name in ("train/ant/a.png", "train/bee/b.png", "train/cow/c.png", "val/cow/d.png", "flat/e.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(plain(1)))
    options = {"image_size": (8, 10), "batch_size": 2, "num_workers": 0}
    data = FolderDataModule(
        train=str(tmp_path / "train"), val=str(tmp_path / "val"), test=str(tmp_path / "flat"), **options
    )
    (batch,) = data.val_dataloader()
    assert batch["label"].tolist() == [2] and batch["image"].shape == (1, 3, 8, 10)
    assert len(data.train_dataloader()) == 1
    (batch,) = data.predict_dataloader()  # that of test
    assert batch["label"].tolist() == [-1]
    assert data.val_dataloader() and FolderDataModule(train=str(tmp_path / "train")).val_dataloader() == []


def test_every_argument_is_plain_and_explained():
    for cls in (ShardDataModule, FolderDataModule):
        parser = ArgumentParser()
        parser.add_class_arguments(cls, "data")
        parsed = parser.parse_args(["--data.train", "x", "--data.augment", '["flip"]', "--data.image_size", "[8, 9]"])
        assert parsed.data.augment == ["flip"] and tuple(parsed.data.image_size) == (8, 9)
        helped = parser.format_help()
        assert "share of unreadable" in helped and "likewise outside of training" in helped
