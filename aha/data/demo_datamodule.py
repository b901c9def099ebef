"""The embedded demo as a Lightning data module: one-digit and two-digit pictures, no download."""

from __future__ import annotations

from torch.utils.data import ConcatDataset, DataLoader

from aha.data.demo import DemoDataset
from aha.data.step_stream import _StepDataModule


class DemoDataModule(_StepDataModule):
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
        if not 0 <= two_digit_share <= 1:
            msg = f"two_digit_share must lie in [0, 1], got {two_digit_share}."
            raise ValueError(msg)
        lengths = {"train_length": train_length, "val_length": val_length, "test_length": test_length}
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed, **lengths)
        self.train_length = train_length
        self.two_digit_share = two_digit_share
        self.val_length = val_length
        self.test_length = test_length

    def train_dataloader(self) -> DataLoader:
        two = round(self.train_length * self.two_digit_share)
        sets = [
            DemoDataset("train", digits=d, length=n, seed=self.seed)
            for d, n in ((1, self.train_length - two), (2, two))
            if n
        ]
        return self._train(ConcatDataset(sets), self.train_length)

    def val_dataloader(self) -> DataLoader:
        return self._eval(DemoDataset("val", length=self.val_length, seed=self.seed))

    def test_dataloader(self) -> list[DataLoader]:
        return [self._eval(DemoDataset("test", digits=d, length=self.test_length, seed=self.seed)) for d in (1, 2)]
