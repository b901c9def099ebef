"""Training batches that are a function of (seed, step) alone, for data sets that can draw any sample when asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset


class _StepDataModule(LightningDataModule):
    """What data modules over such sets share: their loaders, and sizes that are at least 1.

    Args:
        batch_size: samples per step and process.
        eval_batch_size: samples per validation or test batch.
        seed: of the order of training samples.
        lengths: further sizes to check, by name.
    """

    def __init__(self, *, batch_size: int, eval_batch_size: int, seed: int, **lengths: int) -> None:
        super().__init__()
        for name, value in {"batch_size": batch_size, "eval_batch_size": eval_batch_size, **lengths}.items():
            if value < 1:
                msg = f"{name} must be at least 1, got {value}."
                raise ValueError(msg)
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed

    def _train(self, data: Dataset, epoch_length: int) -> DataLoader:
        trainer = self.trainer
        # A run by steps is one long epoch, so that its progress bar shows the time that remains.
        epoch = max(epoch_length // (self.batch_size * trainer.world_size), 1)
        steps = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps > 0 else epoch
        return DataLoader(StepStream(data, self.batch_size, steps, self.seed, trainer), batch_size=None)

    def _eval(self, data: Dataset) -> DataLoader:
        # Strided, not padded: every sample counts once on any number of processes.
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return DataLoader(Subset(data, range(rank, len(data), world)), batch_size=self.eval_batch_size)


class StepStream(IterableDataset):
    """Batches indexed by training step, so that resuming at step s goes on with batch s."""

    def __init__(self, data: Dataset, batch_size: int, steps: int, seed: int, trainer: Trainer) -> None:
        self.data = data
        self.batch_size = batch_size
        self.steps = steps
        self.seed = seed
        self.trainer = trainer

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self.trainer.global_step * self.trainer.accumulate_grad_batches
        for step in range(start, start + self.steps):
            generator = torch.Generator().manual_seed(hash((self.seed, step)) % 2**63)
            chosen = torch.randint(len(self.data), (self.trainer.world_size, self.batch_size), generator=generator)
            items = [self.data[int(i)] for i in chosen[self.trainer.global_rank]]
            yield {
                "image": torch.stack([item["image"] for item in items]),
                "label": torch.tensor([item["label"] for item in items]),
                "key": [item["key"] for item in items],
            }
