"""Cut-outs on photographs as a Lightning data module: fresh scenes in every step, masks for validation and testing."""

from __future__ import annotations

from typing import Any

from lightning import LightningDataModule
from torch.utils.data import DataLoader, Subset

from aha.data.cutouts import STAMP_CLASSES, STAMPS, CutoutDataset
from aha.data.demo_datamodule import StepStream
from aha.data.pipeline import collate

ENDLESS = 2**31  # scenes are drawn when asked for; none comes twice but by chance


class CutoutDataModule(LightningDataModule):
    """Scenes of :class:`~aha.data.cutouts.CutoutDataset`; training draws batch s as a function of (seed, s) alone.

    Args:
        stamps: folder of RGBA cut-outs.
        backgrounds: folder or shards of photographs; default: those of scikit-image and scikit-learn.
        image_size: side in pixels.
        batch_size: samples per step and process.
        epoch_length: scenes that an epoch counts, for a run that isn't set by max_steps.
        val_length: validation scenes.
        test_length: test scenes.
        eval_batch_size: scenes per validation or test batch.
        seed: of the scenes.
        classes: glob patterns below ``stamps`` for each class; default: the stamps' twelve.
    """

    def __init__(
        self,
        *,
        stamps: str = STAMPS,
        backgrounds: str | None = None,
        image_size: int = 112,
        batch_size: int = 8,
        epoch_length: int = 4096,
        val_length: int = 64,
        test_length: int = 128,
        eval_batch_size: int = 32,
        seed: int = 0,
        classes: dict[str, list[str]] | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"batch_size": batch_size, "eval_batch_size": eval_batch_size}.items():
            if value < 1:
                msg = f"{name} must be at least 1, got {value}."
                raise ValueError(msg)
        self.batch_size, self.eval_batch_size, self.epoch_length = batch_size, eval_batch_size, epoch_length
        self.val_length, self.test_length, self.seed = val_length, test_length, seed
        self.image_size = (image_size, image_size)
        self.options: dict[str, Any] = {"stamps": stamps, "backgrounds": backgrounds, "size": image_size, "seed": seed}
        self.options["classes"] = STAMP_CLASSES if classes is None else classes

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        # A run by steps is one long epoch, so that its progress bar shows the time that remains.
        epoch = max(self.epoch_length // (self.batch_size * trainer.world_size), 1)
        steps = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps > 0 else epoch
        data = CutoutDataset("train", length=ENDLESS, **self.options)
        return DataLoader(StepStream(data, self.batch_size, steps, self.seed, trainer), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return self._eval(CutoutDataset("val", length=self.val_length, **self.options))

    def test_dataloader(self) -> DataLoader:
        return self._eval(CutoutDataset("test", length=self.test_length, **self.options))

    def _eval(self, data: CutoutDataset) -> DataLoader:
        # Strided, not padded: every sample counts once on any number of processes.
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        share = Subset(data, range(rank, len(data), world))
        return DataLoader(share, batch_size=self.eval_batch_size, collate_fn=collate)
