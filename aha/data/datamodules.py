"""Lightning data modules over shards and folders; batches as :func:`aha.data.pipeline.collate` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import lightning.pytorch as pl

from aha.data.augment import Augmentation, augment_batch
from aha.data.folder import FolderDataset
from aha.data.loaders import EvalLoader, TrainLoader
from aha.data.pictures import Resize
from aha.data.pipeline import Recipe, Source, Tally, stream_seed
from aha.data.shards import ShardSource
from aha.data.sources import expand_urls, info_samples

Urls = str | list[str]
StartMethod = Literal["fork", "forkserver", "spawn"]
_SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class _StreamDataModule(pl.LightningDataModule):
    """What shards and folders share: loaders that know rank, world size, epoch and step from the trainer."""

    def __init__(
        self,
        *,
        paths: dict[str, Any],
        image_size: int | tuple[int, int],
        resize: Resize,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        worker_start: StartMethod | None,
        seed: int,
        max_bad_rate: float,
        augment: Sequence[Augmentation],
    ) -> None:
        super().__init__()
        if batch_size < 1 or num_workers < 0 or not 0 <= max_bad_rate <= 1:
            msg = (
                f"batch_size must be ≥ 1, num_workers ≥ 0 and max_bad_rate in [0, 1]; got {batch_size}, {num_workers}, "
                f"{max_bad_rate}."
            )
            raise ValueError(msg)
        unknown = set(augment) - set(get_args(Augmentation))
        if unknown:
            msg = f"unknown augmentations {sorted(unknown)}; choose among {', '.join(get_args(Augmentation))}."
            raise ValueError(msg)
        test = paths["test"] if paths["test"] is not None else paths["val"]
        self.paths = {**paths, "test": test, "predict": paths["predict"] if paths["predict"] is not None else test}
        size = (image_size, image_size) if isinstance(image_size, int) else (int(image_size[0]), int(image_size[1]))
        common = {"image_size": size, "resize": resize, "max_bad_rate": max_bad_rate}
        self.train_recipe = Recipe(batch_size=batch_size, **common)
        self.eval_recipe = Recipe(batch_size=eval_batch_size or batch_size, **common)
        self.num_workers, self.worker_start = num_workers, worker_start
        self.seed, self.augment = seed, tuple(augment)
        self.sources: dict[str, Source] = {}
        self.loaders: dict[str, EvalLoader] = {}
        self.samples = 0
        self._resume: dict[str, Any] | None = None

    def _make(self, split: str) -> tuple[Source, int]:
        """The source of a split, and for training the number of samples per epoch."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Find the data of the stage's splits."""
        for split in _SPLITS.get(stage or "", ("train", "val", "test", "predict")):
            if self.paths[split] is not None and split not in self.sources:
                self.sources[split], samples = self._make(split)
                self.samples = samples if split == "train" else self.samples

    def _place(self) -> dict[str, Any]:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        return {"rank": rank, "world": world, "workers": self.num_workers, "start_method": self.worker_start}

    def _progress(self) -> tuple[int, int]:
        return self.trainer.current_epoch, self.trainer.global_step

    def train_dataloader(self) -> TrainLoader:
        """Full batches, equally many on every rank.

        Raises:
            ValueError: if there are too few samples for one batch per rank.
        """
        self._require("train")
        place, batch = self._place(), self.train_recipe.batch_size
        steps = self.samples // (batch * place["world"])
        if steps == 0:
            msg = f"{self.samples} training samples don't fill one batch of {batch} on each of {place['world']} ranks."
            raise ValueError(msg)
        progress = self._progress if self.trainer is not None else None
        self.loaders["train"] = loader = TrainLoader(
            self.sources["train"], self.train_recipe, steps=steps, seed=self.seed, progress=progress, **place
        )
        if self._resume is not None:
            loader.load_state_dict(self._resume)
            self._resume = None
        return loader

    # Lightning keeps the loader's state as well, but doesn't load it where a schedule has asked for the number of steps
    # (2.6: the loader is made then, before the loops' states are read).
    def state_dict(self) -> dict[str, Any]:
        """How far the running training epoch is, for the checkpoint."""
        return {"train": self.loaders["train"].state_dict()} if "train" in self.loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next training loader goes on from there."""
        if self.trainer is None or self.trainer.state.fn == "fit":  # Lightning calls it for tests, too
            self._resume = state_dict.get("train")

    def val_dataloader(self) -> EvalLoader | list:
        """Every sample once over all ranks; no loader if no validation data was given."""
        return self._evaluate("val") if self.paths["val"] is not None else []

    def test_dataloader(self) -> EvalLoader:
        """Every sample once over all ranks."""
        return self._evaluate("test")

    def predict_dataloader(self) -> EvalLoader:
        """Every sample once over all ranks."""
        return self._evaluate("predict")

    def _evaluate(self, split: str) -> EvalLoader:
        self._require(split)
        self.loaders[split] = loader = EvalLoader(self.sources[split], self.eval_recipe, name=split, **self._place())
        return loader

    def tally(self, split: str = "train") -> Tally:
        """What this rank has seen and skipped in the running (or last) pass over a split, for a sum over ranks."""
        return self.loaders[split].tally if split in self.loaders else Tally()

    def _require(self, split: str) -> None:
        if self.paths[split] is None:
            msg = f"no {split} data: give {type(self).__name__}({split}=…)."
            raise ValueError(msg)
        if split not in self.sources:
            self.setup(_stage_of(split))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment on the device, only while training; otherwise images stay uint8."""
        if self.augment and self.trainer is not None and self.trainer.training:
            return augment_batch(batch, self.augment, seed=stream_seed(self.seed, self.trainer.current_epoch))
        return batch


def _stage_of(split: str) -> str:
    return {"train": "fit", "val": "validate"}.get(split, split)


class ShardDataModule(_StreamDataModule):
    """WebDataset shards in the layout of timm/imagenet-1k-wds.

    Args:
        train: training shards: brace pattern, glob, folder or list; local, hf://, http(s)://, s3://, gs://, …
        val: validation shards.
        test: test shards; default: those of val.
        predict: shards to explain; default: those of test.
        image_size: height and width, or one side, of the pictures as the workers deliver them.
        resize: "squash" to that size without crop, as the paper does, or "crop": the largest central part.
        batch_size: pictures per batch and process.
        eval_batch_size: likewise outside of training; default: batch_size.
        num_workers: reading processes per training process.
        worker_start: how these start: fork, forkserver or spawn; default: the platform's way.
        train_samples: samples per training epoch over all processes; default: by the shards' _info.json.
        shuffle_buffer: encoded samples per worker among which training draws.
        seed: of the training order and augmentation.
        max_bad_rate: share of unreadable samples above which the run stops.
        augment: any of "flip", "random_resized_crop" and "color_jitter", on the device, while training.
        source_retries: attempts after a failing read before the run stops.
        source_backoff: seconds before the first of these, doubled each time.
        allow_pipe: permit pipe: addresses, which run a shell command.
    """

    def __init__(
        self,
        *,
        train: Urls | None = None,
        val: Urls | None = None,
        test: Urls | None = None,
        predict: Urls | None = None,
        image_size: int | tuple[int, int] = 224,
        resize: Resize = "squash",
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        worker_start: StartMethod | None = None,
        train_samples: int | None = None,
        shuffle_buffer: int = 1000,
        seed: int = 0,
        max_bad_rate: float = 0.01,
        augment: list[Augmentation] | None = None,
        source_retries: int = 6,
        source_backoff: float = 1.0,
        allow_pipe: bool = False,
    ) -> None:
        super().__init__(
            paths={"train": train, "val": val, "test": test, "predict": predict},
            image_size=image_size,
            resize=resize,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            worker_start=worker_start,
            seed=seed,
            max_bad_rate=max_bad_rate,
            augment=augment or (),
        )
        self.train_samples = train_samples
        self.source_options = {
            "shuffle_buffer": shuffle_buffer,
            "retries": source_retries,
            "backoff": source_backoff,
            "allow_pipe": allow_pipe,
        }

    def _make(self, split: str) -> tuple[ShardSource, int]:
        allow_pipe = self.source_options["allow_pipe"]
        shards = expand_urls(self.paths[split], allow_pipe=allow_pipe)
        source = ShardSource(shards=tuple(shards), **self.source_options)
        if split != "train":
            return source, 0
        world = self._place()["world"]
        if len(shards) < world:
            msg = (
                f"{len(shards)} training shards for {world} ranks: give at least one per rank, better several per "
                "worker (write smaller ones: aha shards FOLDER OUT --shard_size …)."
            )
            raise ValueError(msg)
        samples = self.train_samples or info_samples(shards, allow_pipe=allow_pipe)
        if samples is None:
            msg = (
                f"the number of samples in {shards[0]!r} and the {len(shards) - 1} others is unknown: no _info.json "
                "beside them lists them all. Give train_samples=…"
            )
            raise ValueError(msg)
        return source, samples


class FolderDataModule(_StreamDataModule):
    """Folders of pictures: class folders, or flat without labels. Labels follow the training folder's classes.

    Args:
        train: folder of training pictures.
        val: folder of validation pictures.
        test: folder of test pictures.
        predict: folder of pictures to explain; default: that of test.
        classes: class folders in the order of their labels; default: those of train, sorted.
        image_size: height and width, or one side, of the pictures as the workers deliver them.
        resize: "squash" to that size without crop, as the paper does, or "crop": the largest central part.
        batch_size: pictures per batch and process.
        eval_batch_size: likewise outside of training; default: batch_size.
        num_workers: reading processes per training process.
        worker_start: how these start: fork, forkserver or spawn; default: the platform's way.
        seed: of the training order and augmentation.
        max_bad_rate: share of unreadable pictures above which the run stops.
        augment: any of "flip", "random_resized_crop" and "color_jitter", on the device, while training.
    """

    def __init__(
        self,
        *,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        classes: list[str] | None = None,
        image_size: int | tuple[int, int] = 224,
        resize: Resize = "squash",
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        worker_start: StartMethod | None = None,
        seed: int = 0,
        max_bad_rate: float = 0.01,
        augment: list[Augmentation] | None = None,
    ) -> None:
        super().__init__(
            paths={"train": train, "val": val, "test": test, "predict": predict},
            image_size=image_size,
            resize=resize,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            worker_start=worker_start,
            seed=seed,
            max_bad_rate=max_bad_rate,
            augment=augment or (),
        )
        self.classes = classes

    def _make(self, split: str) -> tuple[FolderDataset, int]:
        if self.classes is None and split != "train" and self.paths["train"] is not None:
            self.classes = FolderDataset(self.paths["train"]).classes or None
        recipe = self.eval_recipe
        dataset = FolderDataset(
            self.paths[split], image_size=recipe.image_size, resize=recipe.resize, classes=self.classes
        )
        if split == "train" and self.classes is None:
            self.classes = dataset.classes or None
        return dataset, len(dataset)
