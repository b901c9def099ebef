"""Cut-outs on photographs as a Lightning data module: fresh scenes in every step, masks for validation and testing."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from aha.data.cutouts import STAMP_CLASSES, STAMPS, CutoutDataset
from aha.data.step_stream import _StepDataModule

ENDLESS = 2**31  # scenes are drawn when asked for; none comes twice but by chance


class CutoutDataModule(_StepDataModule):
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
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed)
        self.epoch_length, self.val_length, self.test_length = epoch_length, val_length, test_length
        self.image_size = (image_size, image_size)
        self.options: dict[str, Any] = {"stamps": stamps, "backgrounds": backgrounds, "size": image_size, "seed": seed}
        self.options["classes"] = STAMP_CLASSES if classes is None else classes

    def train_dataloader(self) -> DataLoader:
        return self._train(CutoutDataset("train", length=ENDLESS, **self.options), self.epoch_length)

    def val_dataloader(self) -> DataLoader:
        return self._eval(CutoutDataset("val", length=self.val_length, **self.options))

    def test_dataloader(self) -> DataLoader:
        return self._eval(CutoutDataset("test", length=self.test_length, **self.options))
