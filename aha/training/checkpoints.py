"""Checkpoints that are whole whenever the process dies or the disk is full, and a last one that is the last."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from aha.export.atomic import write_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their destination and moves them there in one step.

    Lightning's own writer stages files in the system's temporary folder, from where a move to another disk is a copy
    that a killed process leaves half done. Remote paths are left to it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            write_atomically(path, buffer.getbuffer())
        except OSError as error:
            msg = f"The checkpoint {path} could not be written ({error.strerror}); the previous one is intact."
            raise OSError(error.errno, msg) from error


class LastCheckpoint(Callback):
    """Writes the state of the run to one file: after every validation, by the clock, at the end, and on an error.

    Lightning's own ``save_last`` follows the best checkpoint, so a run that no longer improves would lose its steps.

    Args:
        path: the file.
        minutes: at most this long between two writings (looked at every ``stride`` steps).
        stride: steps between two looks at the clock, which all processes take together.
    """

    def __init__(self, path: str | Path, *, minutes: float = 15.0, stride: int = 20) -> None:
        self.path = Path(path)
        self.minutes = minutes
        self.stride = stride
        self.written = time.monotonic()

    def save(self, trainer: Trainer) -> None:
        """Write now; every process must call it."""
        trainer.save_checkpoint(self.path, weights_only=False)  # optimiser and loops as well
        self.written = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.written = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self.stride == 0:
            due = time.monotonic() - self.written >= 60 * self.minutes
            if trainer.strategy.broadcast(due):
                self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.fast_dev_run:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:
            self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An error before the first step, or while writing, leaves nothing worth keeping.
        if trainer.state.fn == "fit" and trainer.global_step > 0 and not isinstance(exception, OSError):
            self.save(trainer)
