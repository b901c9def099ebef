"""The embedded demo as a Lightning data module: one-digit and two-digit pictures, no download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from aha.data.demo import DemoDataset


class DemoDataModule(LightningDataModule):
    """Handwritten digits on clutter, 64×64 (scikit-learn's digits; generated at start-up, deterministic).

    Training draws batch s as a function of (seed, s) alone, on all ranks one global batch: a resumed run sees the
    samples that an uninterrupted one would have seen.

    Args:
        batch_size: samples per step and process.
        train_length: pictures generated for training.
        two_digit_share: share of the training pictures that show two digits of different classes.
        val_length: validation pictures (one digit).
        test_length: test pictures with one digit, and as many with two.
        eval_batch_size: pictures per validation or test batch.
        seed: of the pictures and of their order.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        train_length: int = 4096,
        two_digit_share: float = 0.5,
        val_length: int = 128,
        test_length: int = 512,
        eval_batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= two_digit_share <= 1:
            msg = f"two_digit_share must lie in [0, 1], got {two_digit_share}."
            raise ValueError(msg)
        sizes = {"batch_size": batch_size, "train_length": train_length, "val_length": val_length}
        sizes |= {"test_length": test_length, "eval_batch_size": eval_batch_size}
        for name, value in sizes.items():
            if value < 1:
                msg = f"{name} must be at least 1, got {value}."
                raise ValueError(msg)
        self.batch_size = batch_size
        self.train_length = train_length
        self.two_digit_share = two_digit_share
        self.val_length = val_length
        self.test_length = test_length
        self.eval_batch_size = eval_batch_size
        self.seed = seed

    def train_dataloader(self) -> DataLoader:
        two = round(self.train_length * self.two_digit_share)
        sets = [
            DemoDataset("train", digits=d, length=n, seed=self.seed)
            for d, n in ((1, self.train_length - two), (2, two))
            if n
        ]
        trainer = self.trainer
        # A run by steps is one long epoch, so that its progress bar shows the time that remains.
        epoch = max(self.train_length // (self.batch_size * trainer.world_size), 1)
        steps = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps > 0 else epoch
        return DataLoader(StepStream(ConcatDataset(sets), self.batch_size, steps, self.seed, trainer), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return self._eval(DemoDataset("val", length=self.val_length, seed=self.seed))

    def test_dataloader(self) -> list[DataLoader]:
        return [self._eval(DemoDataset("test", digits=d, length=self.test_length, seed=self.seed)) for d in (1, 2)]

    def _eval(self, data: DemoDataset) -> DataLoader:
        # Strided, not padded: every sample counts once on any number of processes.
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        share = Subset(data, range(rank, len(data), world))
        return DataLoader(share, batch_size=self.eval_batch_size)


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
